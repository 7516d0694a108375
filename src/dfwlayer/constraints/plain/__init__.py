"""Projections in tensor operations alone, none of which depends on the data.

What is here can be traced and exported: there is no question whose answer is a value, and no loop
that watches its own convergence. Everything is done in double precision; the last operation puts
the answer, in the precision it is wanted in, back into the set.
"""

from dfwlayer.constraints.plain.balls import PlainEllipsoid, PlainGroups, PlainPower
from dfwlayer.constraints.plain.base import Plain, PlainFormula
from dfwlayer.constraints.plain.composed import PlainProduct, PlainShifted
from dfwlayer.constraints.plain.flat import PlainFlat
from dfwlayer.constraints.plain.matrices import PlainSpectraplex, PlainSpectrum
from dfwlayer.constraints.plain.rows import PlainAffine, PlainRows
from dfwlayer.constraints.plain.sums import PlainSums

__all__ = [
    "Plain",
    "PlainAffine",
    "PlainEllipsoid",
    "PlainFlat",
    "PlainFormula",
    "PlainGroups",
    "PlainPower",
    "PlainProduct",
    "PlainRows",
    "PlainShifted",
    "PlainSpectraplex",
    "PlainSpectrum",
    "PlainSums",
]
