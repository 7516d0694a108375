"""One problem without a batch, from gradients in the variables to those in the parameters.

What a solution has to do with the arrays of its problem is told by `dfwlayer.engines.compiled`; the
arrays are sums of products of parameters. Gradients go the same way back, see `single`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, from_numpy

from dfwlayer.integrations.cvxpy.single import BOUNDS, SIDES, Found, Named, Numbers, Single

__all__ = ["pulled"]


def pulled(
    single: Single, found: Found, arriving: Sequence[Tensor | None], params: Sequence[Tensor]
) -> list[Tensor | None] | None:
    """Gradients in the parameters from some in the variables, None where tensors know."""
    with np.errstate(all="ignore"):
        return _Pullback(single, found).through(arriving, params)


class _Pullback:
    """Gradients on their way back."""

    def __init__(self, single: Single, found: Found) -> None:
        self.single, self.found = single, found
        self.flat = np.zeros(single.size)  # those in all arrays that vary
        self.out: Named = {
            name: self.flat[first:end].reshape(shape) for name, shape, first, end in single.parts
        }

    def through(
        self, arriving: Sequence[Tensor | None], params: Sequence[Tensor]
    ) -> list[Tensor | None] | None:
        """See `pulled`."""
        w = self._of_slopes(self._of_variables(arriving))
        if w is None:
            return None
        if self.single.scale != 1:
            w = w / self.single.scale
        self._of_objective(w)
        terms, group = self._of_terms(), self.single.group
        gradients: list[Tensor | None] = [None] * len(params)
        first = int(group.one)
        for i in group.parameters:
            like = params[i]
            end = first + like.numel()
            part = from_numpy(terms[first:end].copy()).reshape(like.shape)
            gradients[i] = part if like.dtype == torch.float64 else part.to(like.dtype)
            first = end
        return gradients

    def _of_terms(self) -> Numbers:
        """Those in the terms, products of which go on to their factors."""
        group, known = self.single.group, self.found.terms
        terms: Numbers = group.matrix.transposed.matrix @ self.flat
        most = len(known) - len(group.left)
        for first, end in reversed(list(pairwise((0, *group.levels)))):
            left, right = (side[first:end].numpy() for side in (group.left, group.right))
            own = terms[most + first : most + end]
            np.add.at(terms, left, own * known[right])
            np.add.at(terms, right, own * known[left])
        return terms

    def _of_variables(self, arriving: Sequence[Tensor | None]) -> Numbers:
        """The gradient in y."""
        at, y, out = self.found.at, self.found.y, self.out
        total = np.zeros(len(y))
        for each, gradient in zip(self.single.outputs, arriving, strict=True):
            if gradient is None:
                continue
            v = gradient.detach().resolve_neg().numpy().reshape(-1)
            if each.places is None:
                if f"{each.name}.k" in out:
                    out[f"{each.name}.k"] += v
                if each.moves:
                    total += v @ at[f"{each.name}.K"]
                    if f"{each.name}.K" in out:
                        out[f"{each.name}.K"] += v[:, None] * y
            elif isinstance(each.places, slice):
                total[each.places] += v
            else:
                np.add.at(total, each.places.numpy(), v)
        return total

    def _of_slopes(self, v: Numbers) -> Numbers | None:
        """The gradient in the q that was solved for, and those in the arrays of the set."""
        single, alone = self.single, self.found.alone
        if single.turned is not None:
            return self._of_ellipsoid(v)
        if not single.varies:
            of_set = alone.gradients((False,) * len(alone.tensors), v)
            return None if of_set is None else of_set[0]
        assert single.made is not None
        of_set = alone.gradients(single.made.asked, v)
        if of_set is None:
            return None
        w: Numbers = of_set[0]
        self._of_set(w, of_set[1:])
        return w

    def _of_ellipsoid(self, v: Numbers) -> Numbers | None:
        """The gradient in q, and those in W, c and ρ, of ∇f + μ Wᵀ(W y + c) = 0 on the sphere."""
        found, part, out = self.found, self.single.turned, self.out
        turned = found.turned
        assert turned is not None and part is not None  # noqa: PT018
        rho, u = found.at[f"{part.name}.radius"], found.alone.x
        of_set = found.alone.gradients((False, False, True), turned.inverse.T @ v)
        if of_set is None:
            return None
        moved, *_, of_radius = of_set
        w: Numbers = turned.inverse @ moved
        if f"{part.name}.radius" in out:
            out[f"{part.name}.radius"] += of_radius.item()
        held = found.alone.multiplier > 0
        mu = -(u @ (turned.P @ u + turned.q)) / (u @ u) if held else 0.0
        of_c = mu * moved - of_radius.item() / rho.item() * u
        if f"{part.name}.c" in out:
            out[f"{part.name}.c"] += of_c
        if f"{part.name}.W" in out:
            of_W = out[f"{part.name}.W"]
            of_W += of_c[:, None] * found.y
            of_W += (mu * u)[:, None] * w
        return w

    def _of_set(self, w: Numbers, rest: Sequence[Numbers | None]) -> None:
        """Gradients in the arrays of the set, and in those of kinks."""
        made = self.single.made
        assert made is not None
        at, n, bent = self.found.at, len(w), self.found.where is not None
        own: Named = {} if bent else self.out
        for link in made.links:
            gradient, name = rest[link.tensor], link.name
            if not bent and name not in own:
                continue
            assert gradient is not None
            if name not in own:
                own[name] = np.zeros(n if name in BOUNDS else at[name].shape)
            if link.places is None:
                own[name] += gradient.reshape(own[name].shape)
            else:
                own[name].reshape(-1)[link.places] += gradient.reshape(-1)[link.entries]
        if bent:
            self._of_kinks(w, own)

    def _of_kinks(self, w: Numbers, own: Named) -> None:
        """From those in rows, sides and ends of the pieces: see `Single._on_pieces`."""
        at, out, where, n = self.found.at, self.out, self.found.where, len(w)
        pieces = self.single.model.pieces
        assert where is not None and pieces is not None  # noqa: PT018
        place, passed = at["kink.place"], where.passed[0]
        of_place, jump = np.zeros(place.shape), at.get("kink.jump")
        if jump is not None:
            of_row, of_side = own["G"][: len(jump), :, None], own["h"][: len(jump), None, None]
            of_place += (of_side * jump * passed).sum(0)
            if "kink.jump" in out:
                out["kink.jump"] += passed * (of_row + of_side * place)
        ends = np.concatenate((own["lower"], own["upper"]))
        pool = np.bincount(where.ends[0], ends, place.size + 2 * n)
        of_place += pool[: place.size].reshape(place.shape)
        of_bounds, region = pool[place.size :].reshape(2, n), pieces.region
        for name, of_bound, places in zip(
            BOUNDS, of_bounds, (region.lower, region.upper), strict=True
        ):
            if name in out:
                out[name] += of_bound[places]
        for name in SIDES:
            if name in out:
                out[name] += own[name]
        if "kink.place" in out:
            out["kink.place"] += of_place
        if "kink.cost" in out:
            out["kink.cost"] += passed * (w / self.single.scale)[:, None]

    def _of_objective(self, w: Numbers) -> None:
        """Gradients of ⟨w, ∇f(y)⟩, with ∇f = P y + q + Kᵀ(P_z (K y + k) + q_z)."""
        at, y, out = self.found.at, self.found.y, self.out
        if "q" in out:
            out["q"] += w
        if "P" in out:
            out["P"] += 0.5 * (w[:, None] * y + y[:, None] * w)
        K = at.get("K")
        if K is None:
            return
        Kw = K @ w
        if "qz" in out:
            out["qz"] += Kw
        if "k" in out:
            out["k"] += at["Pz"] * Kw
        if "K" in out or "Pz" in out:
            z = K @ y + at["k"]
            if "Pz" in out:
                out["Pz"] += Kw * z
            if "K" in out:
                of_K = out["K"]
                np.multiply((at["Pz"] * Kw)[:, None], y, out=of_K)
                of_K += (at["Pz"] * z + at["qz"])[:, None] * w
