"""Problems written in cvxpy: the layer of cvxpylayers, answered by this library.

    from dfwlayer.integrations.cvxpy import CvxpyLayer   # was: from cvxpylayers.torch

Needs cvxpy 1.9 or later; nothing else in this package imports it.
"""

import cvxpy
from cvxpy.utilities import scopes

if not hasattr(scopes, "quad_form_dpp_scope"):
    raise ImportError(f"cvxpy: expected version 1.9 or later, found {cvxpy.__version__}")

from dfwlayer.integrations.cvxpy.layer import CvxpyLayer, ForwardedWarning
from dfwlayer.integrations.cvxpy.recognise import NotRecognisedError

__all__ = ["CvxpyLayer", "ForwardedWarning", "NotRecognisedError"]
