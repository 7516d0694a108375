"""Backpropagation by hand for small networks.

At batches of 100 rows on one core, autograd and memory that is allocated anew in every step take
as long as the products do. Here a network's parameters are one vector, its gradient another, and
the passes write into memory that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Passes", "flatten", "views"]


def flatten(network: nn.Module) -> Tensor:
    """One vector that holds the network's parameters, which become views of it."""
    with torch.no_grad():
        vector = torch.cat([parameter.reshape(-1) for parameter in network.parameters()])
        for parameter, view in zip(network.parameters(), views(network, vector), strict=True):
            parameter.data = view
    return vector


def views(network: nn.Module, vector: Tensor) -> list[Tensor]:
    """A vector cut into the shapes of the network's parameters, in their order."""
    shapes = [parameter.shape for parameter in network.parameters()]
    parts = torch.split(vector, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Passes:
    """The forward and backward pass of C networks side by side, ReLU between their layers."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor], rows: int) -> None:
        """weights (C, outputs, inputs) and biases (C, 1, outputs) of each layer; rows of a batch.

        They are read in every pass, so they may change in place.
        """
        self.weights = [weight.detach() for weight in weights]
        self.biases = [bias.detach() for bias in biases]
        first = self.weights[0]
        self.inputs = first.new_empty(0)
        self.outputs = [
            first.new_empty(len(weight), rows, weight.shape[1]) for weight in self.weights
        ]
        self.slopes = [
            first.new_empty(len(weight), rows, weight.shape[2]) for weight in self.weights
        ]

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs (C, rows, outputs) of inputs (C, rows, inputs); the next call overwrites them."""
        self.inputs = values = inputs
        for layer, output in enumerate(self.outputs):
            if layer:
                values.clamp_min_(0.0)
            torch.baddbmm(self.biases[layer], values, self.weights[layer].mT, out=output)
            values = output
        return values

    def backward(
        self,
        slope: Tensor,
        gradients: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
        *,
        to_inputs: bool = False,
    ) -> Tensor:
        """Carry the loss's slope (C, rows, outputs) at the last outputs back.

        ``gradients`` are overwritten with those in the weights and biases. The slope returned is
        that at the inputs if wanted, otherwise at the first layer's outputs.
        """
        for layer in reversed(range(len(self.weights))):
            before = self.outputs[layer - 1] if layer else self.inputs
            if gradients is not None:
                torch.bmm(slope.mT, before, out=gradients[0][layer])
                torch.sum(slope, 1, keepdim=True, out=gradients[1][layer])
            if layer or to_inputs:
                slope = torch.bmm(slope, self.weights[layer], out=self.slopes[layer])
            if layer:  # through ReLU: its slope is 1 where it let its input pass
                torch.ops.aten.threshold_backward.grad_input(slope, before, 0.0, grad_input=slope)
        return slope
