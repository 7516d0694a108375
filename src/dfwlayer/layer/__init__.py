"""Layers: settings in the constructor, problems in forward."""

from dfwlayer.layer.ball import DFWLayer
from dfwlayer.layer.program import QPLayer
from dfwlayer.layer.sets import SetLayer

__all__ = ["DFWLayer", "QPLayer", "SetLayer"]
