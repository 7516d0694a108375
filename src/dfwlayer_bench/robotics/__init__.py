"""Robots with a power limit: experts trained by reinforcement, and policies that imitate them."""
