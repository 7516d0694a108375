"""What Numba compiles: arrays in, arrays out, one problem after the other.

Arguments have no types here, as Numba finds them; comments give their shapes. Everything is float64
and contiguous, so that each function is compiled once. Only functions that are an ``entry`` have a
way in from Python; calling one of the others from there ends the process. A ``kernel`` works in
memory that its caller holds; what makes arrays is ``making``, and so is what is called by it and
returns some. Entries do problems first … end − 1 of a batch of B. Arrays whose first dimension is ·
have a line for each problem, or one for all:

    P, q            (·, n, n), or (·, 0, 0) for the identity, and (·, n)
    A, rhs          (·, m, n) and b (·, m) with P = AᵀA and q = −Aᵀb, or both empty
    weights, radii  (·, n), positive, and (·, 1), of balls
    bodies, blocks  (·, k, n + 2) and (·, 4), of sets in normal form, see `table`
    E, e, G, h      (·, k, n), (·, k), (·, m, n) and (·, m), the rows of polyhedra
    lowers, uppers  (·, n), their bounds
    start           (·, n)
    eps, tol, most  of the dtype that x is rounded to, the tolerance, and the most steps
    v               (B, n), the gradient that arrives

and where the results go:

    x               (B, n)
    values          (2, B), f and the gap
    codes           (2, B), an `outcome` and the steps
    places, sides   (B, n), see `place`, and the signs of x in budgets
    multipliers     (B, 1) or (B, k); of polyhedra (B, k + m + n), those of bounds last
    u, nu, rest     (B, n), like the multipliers, and (B, n), v − P u − Σ ν_j a_j
"""
