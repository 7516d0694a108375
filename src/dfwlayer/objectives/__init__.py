"""Objectives: value, gradient, Hessian products and curvature of B problems at once."""

from dfwlayer.objectives.base import Curvature, Objective
from dfwlayer.objectives.least_squares import LeastSquares
from dfwlayer.objectives.quadratic import Quadratic
from dfwlayer.objectives.smooth import Smooth

__all__ = ["Curvature", "LeastSquares", "Objective", "Quadratic", "Smooth"]
