"""Generated structures: containers of all kinds in each other, shared, and holding themselves."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
from containers import CONTAINERS, Attrs, Frozen, FrozenSlotted, Plain, Slotted
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

__all__ = ["structures"]


def _function() -> None:
    """A leaf."""


_ATOMS = ("text", "", 3, 2.5, True, None, b"bytes", 1j, range(3), Tensor, _function, len, slice(1))
_MUTABLE = (list, dict, types.SimpleNamespace, Plain, Slotted, Frozen, FrozenSlotted, Attrs)


class _Growing:
    """Tensors that differ in size, so that they can be told apart where there are no numbers."""

    def __init__(self) -> None:
        self.size = 0

    def tensor(self, device: str) -> Tensor:
        self.size += 1
        return torch.zeros(self.size, device=device)

    def packed(self, device: str) -> PackedSequence:
        return pack_sequence([self.tensor("cpu")]).to(device)

    def returned(self, device: str) -> Any:
        return torch.return_types.max((self.tensor(device), self.tensor(device)))

    def small_set(self, device: str) -> set[Any]:
        return {self.tensor(device), "text", Frozen(self.tensor(device), 1)}

    def small_frozenset(self, device: str) -> frozenset[Any]:
        return frozenset([self.tensor(device), (self.tensor(device), 2)])


@st.composite
def structures(draw: Any, devices: tuple[str, ...] = ("cpu", "meta")) -> Any:
    """Return containers in containers: some parts shared, some that hold what holds them."""
    new = _Growing()
    leaves = [new.tensor] * 4 + [new.packed, new.returned, new.small_set, new.small_frozenset]
    pool: list[Any] = [np.ones(2), *_ATOMS]
    for leaf in draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=5)):
        pool.append(leaf(draw(st.sampled_from(devices))))  # noqa: PERF401
    made: list[Any] = []

    def one_of(objects: list[Any]) -> Any:
        # By its index: Hypothesis would ask for the hash of what may hold itself.
        return objects[draw(st.integers(0, len(objects) - 1))]

    for name in draw(st.lists(st.sampled_from(sorted(CONTAINERS)), min_size=1, max_size=8)):
        # What was made last comes first, so that most structures hang together.
        first = made[-1] if made and draw(st.booleans()) else one_of(pool)
        made.append(CONTAINERS[name](first, one_of(pool)))
        pool.append(made[-1])
    for x in made:
        if type(x) in _MUTABLE and draw(st.booleans()):
            _hold(x, one_of(made))
    return made if draw(st.booleans()) else made[-1]


def _hold(x: Any, part: Any) -> None:
    if isinstance(x, list):
        x.append(part)
    elif isinstance(x, dict):
        x["held"] = part
    else:
        object.__setattr__(x, "right", part)
