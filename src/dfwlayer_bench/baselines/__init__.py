"""Layers of others, written here after their papers: Alt-Diff and OptNet."""
