"""What Numba compiles: arrays in, arrays out, one problem after the other.

Arguments have no types here, as Numba finds them; comments give their shapes. Everything is float64
and contiguous, so that each function is compiled once. Only the functions called ``search`` and
``adjoint`` have a way in from Python; calling one of the others from there ends the process.
"""
