"""How a bound problem is run: eagerly, or from a recorded CUDA graph."""
