"""One call of `rebuild`: where tensors go and how, and what was met on the way."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

__all__ = ["Job"]


class Job:
    """One call of `rebuild`: where tensors go and how, and what was met on the way.

    There is one for every batch, so making one costs next to nothing: `device` is set from outside,
    and what is rarely set stands in the class.

    Attributes:
        device: Tensors that are there stay as they are.
        memo: What became of each object that changed, by its id; `begin` gives one to write to.
        begun: Whether there is a memo, because something has been sent.
        plain: What `is_plain` said when the first tensor was sent.
        remarks: Whether there is something to be said or done at the end.
        skip: Keys and attribute names whose values stay as they are.
        strangers: Objects that hold tensors and that nothing here knows how to rebuild.
        kept: What must live as long as its id stands in the memo.
        deep: How many containers were met far down.
    """

    skip: Collection[str] = ()
    strangers: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()
    deep: int = 0

    device: torch.device
    memo: dict[int, Any]
    begun: bool = False
    plain: bool = True
    remarks: bool = False

    @classmethod
    def towards(cls, device: torch.device) -> Self:
        """Return a new job, where time is not scarce."""
        job = cls()
        job.device = device
        return job

    def begin(self) -> dict[int, Any]:
        """Get ready to send: return a memo to write to."""
        if not self.begun:
            self.begun = True
            self.memo = {}
            self.plain = self.is_plain()
        return self.memo

    def is_plain(self) -> bool:
        """Return whether `tensor.to(device)` is all there is to sending a tensor."""
        return True

    def send(self, tensor: Tensor) -> Tensor:
        """Send a tensor that is elsewhere, where there is more to it."""
        return tensor.to(self.device)

    def send_object(self, x: Any) -> Any:
        """Send an object that moves itself, and return the object to use."""
        return x
