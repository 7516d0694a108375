"""Subspaces, Krylov methods, systems on faces, descent over convex hulls."""
