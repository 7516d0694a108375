"""What Triton compiles: one program of the grid takes one problem from start to certificate.

Vectors of n coordinates are blocks of N ≥ n lanes, a power of two. Steps are taken in the dtype of
the data, what decides and what is returned is computed in float64. Lanes beyond n are coordinates
that are held at zero. Nothing is indexed inside of a
block: what the code for the CPU does with an index is done here with a mask.
"""
