"""Numbers per problem, Krylov methods, systems on faces, scales of rounding."""
