"""Minimising over the convex hull of points that an oracle gives one by one."""

from dfwlayer.linalg.hull.descent import Descent, descend_over_hull
from dfwlayer.linalg.hull.points import span

__all__ = ["Descent", "descend_over_hull", "span"]
