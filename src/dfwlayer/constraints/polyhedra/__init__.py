"""Sets with bounds and a few linear constraints."""
