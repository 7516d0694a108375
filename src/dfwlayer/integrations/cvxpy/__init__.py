"""Problems written in cvxpy: the layer of cvxpylayers, answered by this library.

    from dfwlayer.integrations.cvxpy import CvxpyLayer   # was: from cvxpylayers.torch

Needs cvxpy; nothing else in this package imports it.
"""

from dfwlayer.integrations.cvxpy.layer import CvxpyLayer, ForwardedWarning
from dfwlayer.integrations.cvxpy.recognise import NotRecognisedError

__all__ = ["CvxpyLayer", "ForwardedWarning", "NotRecognisedError"]
