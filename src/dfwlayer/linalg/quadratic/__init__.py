"""Quadratic programs: interior-point steps to the face, then the solution on it."""

from dfwlayer.linalg.quadratic.program import Program
from dfwlayer.linalg.quadratic.saddle import Saddle
from dfwlayer.linalg.quadratic.solver import (
    Answer,
    duality_gap,
    least_value,
    minimise,
    minimise_on,
    unopened,
)
from dfwlayer.linalg.quadratic.thin import Thin, pays, thinned
from dfwlayer.linalg.quadratic.thin_face import ThinFace

__all__ = [
    "Answer",
    "Program",
    "Saddle",
    "Thin",
    "ThinFace",
    "duality_gap",
    "least_value",
    "minimise",
    "minimise_on",
    "pays",
    "thinned",
    "unopened",
]
