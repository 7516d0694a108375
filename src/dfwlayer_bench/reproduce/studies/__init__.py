"""Studies of the method itself: temperature, ablations, Theorem 1."""
