"""Gradient modes of a limited actor, compared in training."""
