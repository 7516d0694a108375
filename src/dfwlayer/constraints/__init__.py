"""Convex sets: one file each, with vertex, soft vertex, violation and face."""

from dataclasses import is_dataclass

from dfwlayer.constraints.balls.ellipsoid import Ellipsoid
from dfwlayer.constraints.balls.group_ball import GroupBall
from dfwlayer.constraints.balls.lp_ball import LpBall
from dfwlayer.constraints.balls.schatten_ball import NuclearBall, SchattenBall, SpectralBall
from dfwlayer.constraints.balls.spectraplex import Spectraplex
from dfwlayer.constraints.base import Atoms, Constraint
from dfwlayer.constraints.composed.custom_set import CustomSet
from dfwlayer.constraints.composed.intersection import Intersection
from dfwlayer.constraints.composed.plane_cut import PlaneCut
from dfwlayer.constraints.composed.product import Product
from dfwlayer.constraints.composed.shifted import Shifted
from dfwlayer.constraints.face import Face
from dfwlayer.constraints.parameters import table
from dfwlayer.constraints.polyhedra.affine import (
    AffineSet,
    HalfSpace,
    Hyperplane,
    NonNegative,
)
from dfwlayer.constraints.polyhedra.birkhoff import Birkhoff
from dfwlayer.constraints.polyhedra.box import Box
from dfwlayer.constraints.polyhedra.k_sparse import KSparse
from dfwlayer.constraints.polyhedra.l1_box import L1Box, project_l1_box
from dfwlayer.constraints.polyhedra.polyhedron import Polyhedron
from dfwlayer.constraints.polyhedra.simplex import CappedSimplex, Simplex
from dfwlayer.constraints.polyhedra.transport import Transport

__all__ = [
    "AffineSet",
    "Atoms",
    "Birkhoff",
    "Box",
    "CappedSimplex",
    "Constraint",
    "CustomSet",
    "Ellipsoid",
    "Face",
    "GroupBall",
    "HalfSpace",
    "Hyperplane",
    "Intersection",
    "KSparse",
    "L1Box",
    "LpBall",
    "NonNegative",
    "NuclearBall",
    "PlaneCut",
    "Polyhedron",
    "Product",
    "SchattenBall",
    "Shifted",
    "Simplex",
    "SpectralBall",
    "Spectraplex",
    "Transport",
    "project_l1_box",
]

for _kind in tuple(vars().values()):
    # A compiler cannot follow how a table is made. One that is made while it traces is there when
    # it begins again, which is another way through the code, and an error.
    if isinstance(_kind, type) and issubclass(_kind, Constraint) and is_dataclass(_kind):
        table(_kind)
