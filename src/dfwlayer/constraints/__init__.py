"""Convex sets: one file each, with vertex, soft vertex, violation and face."""

from dfwlayer.constraints.base import Atoms, Constraint, Face
from dfwlayer.constraints.birkhoff import Birkhoff
from dfwlayer.constraints.box import Box
from dfwlayer.constraints.custom_set import CustomSet
from dfwlayer.constraints.ellipsoid import Ellipsoid
from dfwlayer.constraints.group_ball import GroupBall
from dfwlayer.constraints.k_sparse import KSparse
from dfwlayer.constraints.l1_box import L1Box, project_l1_box
from dfwlayer.constraints.lp_ball import LpBall
from dfwlayer.constraints.plane_cut import PlaneCut
from dfwlayer.constraints.product import Product
from dfwlayer.constraints.schatten_ball import NuclearBall, SchattenBall, SpectralBall
from dfwlayer.constraints.shifted import Shifted
from dfwlayer.constraints.simplex import CappedSimplex, Simplex

__all__ = [
    "Atoms",
    "Birkhoff",
    "Box",
    "CappedSimplex",
    "Constraint",
    "CustomSet",
    "Ellipsoid",
    "Face",
    "GroupBall",
    "KSparse",
    "L1Box",
    "LpBall",
    "NuclearBall",
    "PlaneCut",
    "Product",
    "SchattenBall",
    "Shifted",
    "Simplex",
    "SpectralBall",
    "project_l1_box",
]
