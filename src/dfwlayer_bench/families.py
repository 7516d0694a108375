"""The benchmark's problems by the name they were documented under; see `problems.families`."""

from dfwlayer_bench.problems.families import FAMILIES, Family, Instance, make

__all__ = ["FAMILIES", "Family", "Instance", "make"]
