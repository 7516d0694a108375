"""Constrained convex optimisation as a differentiable PyTorch layer."""

from dfwlayer.constraints import (
    Birkhoff,
    Box,
    CappedSimplex,
    CustomSet,
    Ellipsoid,
    GroupBall,
    Intersection,
    KSparse,
    L1Box,
    LpBall,
    NuclearBall,
    PlaneCut,
    Polyhedron,
    Product,
    SchattenBall,
    Shifted,
    Simplex,
    SpectralBall,
    project_l1_box,
)
from dfwlayer.layer import DFWLayer
from dfwlayer.methods import DFW, ActiveSet, FrankWolfe, ProjectedNewton, SequentialQP
from dfwlayer.objectives import LeastSquares, Quadratic, Smooth
from dfwlayer.solution import Progress, Solution, SolveError, Status
from dfwlayer.solve import solve, warm_up
from dfwlayer.step_size import Backtracking, ExactStep, OpenLoop, ShortStep
from dfwlayer.temperature import Anneal, Constant

__version__ = "0.2.0"

__all__ = [
    "DFW",
    "ActiveSet",
    "Anneal",
    "Backtracking",
    "Birkhoff",
    "Box",
    "CappedSimplex",
    "Constant",
    "CustomSet",
    "DFWLayer",
    "Ellipsoid",
    "ExactStep",
    "FrankWolfe",
    "GroupBall",
    "Intersection",
    "KSparse",
    "L1Box",
    "LeastSquares",
    "LpBall",
    "NuclearBall",
    "OpenLoop",
    "PlaneCut",
    "Polyhedron",
    "Product",
    "Progress",
    "ProjectedNewton",
    "Quadratic",
    "SchattenBall",
    "SequentialQP",
    "Shifted",
    "ShortStep",
    "Simplex",
    "Smooth",
    "Solution",
    "SolveError",
    "SpectralBall",
    "Status",
    "project_l1_box",
    "solve",
    "warm_up",
]
