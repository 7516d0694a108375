"""Balls of norms."""
