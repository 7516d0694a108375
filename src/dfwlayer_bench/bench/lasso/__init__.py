"""Sparse least squares: few non-zeros among many columns, at one radius or along a path of them."""
