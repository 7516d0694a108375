"""Quadratic programs with rows, and the rivals that take them, for the suites that pose some."""
