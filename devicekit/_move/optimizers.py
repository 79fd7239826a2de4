"""Move an optimizer's state to its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from devicekit._move.contents import Narrower
from devicekit._move.foreign import send_foreign
from devicekit._move.refusals import reason_of
from devicekit._tree import Job, LeafError, path_of, rebuild
from devicekit._types import CPU
from devicekit.errors import MoveError

__all__ = ["Rewrite", "move_optimizer"]


class Rewrite:
    """What was replaced in an optimizer, so that it can be put back.

    Attributes:
        entries: Each dict and key with what stood there.
        left: The paths of objects that hold tensors elsewhere, and that nothing is known about.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[dict[Any, Any], Any, Any]] = []
        self.left: list[str] = []

    def undo(self) -> None:
        """Put back what stood there."""
        while self.entries:
            table, key, old = self.entries.pop()
            table[key] = old


def move_optimizer(optimizer: Optimizer, *, narrower: Narrower | None = None) -> Rewrite:
    """Move an optimizer's state to where its parameters are, and return what was replaced.

    By torch's own rule (`Optimizer.load_state_dict`): state goes with its parameter, but `step`
    stays on the CPU unless the group is `capturable` or `fused`; moving it would make every step
    wait for the device (pytorch#103256). Tensor hyperparameters such as `lr` go by the rule of
    `step`. What others have put into the optimizer stays where it is. Nothing is changed until
    everything has been copied.

    Raises:
        MoveError: Something could not be copied; nothing has changed.
    """
    places: dict[torch.device, dict[str, Any]] = {}
    entries: dict[str, tuple[dict[Any, Any], Any]] = {}
    for path, table, key, device in _entries(optimizer):
        entries[path] = table, key
        places.setdefault(device, {})[path] = table[key]
    rewrite = Rewrite()
    news: dict[str, Any] = {}
    for device, values in places.items():
        job = _StateJob(device, narrower)
        news |= _sent(values, job)
        rewrite.left += (_path_in(values, stranger) for stranger in job.strangers)
    for path, new in news.items():
        table, key = entries[path]
        if new is not table[key]:
            rewrite.entries.append((table, key, table[key]))
            table[key] = new
    return rewrite


def _entries(
    optimizer: Optimizer,
) -> Iterator[tuple[str, dict[Any, Any], Any, torch.device]]:
    """Yield what has a place of its own: its path, the dict and key it stands at, and the place."""
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        parameters: list[Tensor] = group["params"]
        steps_on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for key in state:
                on_device = key != "step" or steps_on_device
                path = f"optimizer.state[{number}][{key!r}]"
                yield path, state, key, parameter.device if on_device else CPU
            number += 1
        for key in group.keys() & (optimizer.defaults.keys() | _OF_SCHEDULERS):
            path = f"optimizer.param_groups[{index}][{key!r}]"
            yield path, group, key, parameters[0].device if steps_on_device and parameters else CPU


_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


class _StateJob(Job):
    """A job for one place; towards MPS in dtypes that it has."""

    def __init__(self, device: torch.device, narrower: Narrower | None) -> None:
        self.device = device
        self._narrower = (narrower or {}) if device.type == "mps" else {}

    def is_plain(self) -> bool:
        return not self._narrower

    def send(self, tensor: Tensor) -> Tensor:
        dtype = self._narrower.get(tensor.dtype)
        return tensor.to(self.device) if dtype is None else tensor.to(dtype).to(self.device)

    def send_object(self, x: Any) -> Any:
        """Send an object by its own `.to`; what is a model or an optimizer is not state."""
        if isinstance(x, (nn.Module, Optimizer)):
            return x
        return send_foreign(x, self.device, None)


def _sent(values: dict[str, Any], job: _StateJob) -> dict[str, Any]:
    """Return all that goes to one device, sent at once: what two states share stays shared."""
    try:
        sent: dict[str, Any] = rebuild(values, job)
    except LeafError as error:
        raise _failure(error, values, job.device) from error.__cause__
    return sent


def _path_in(values: dict[str, Any], leaf: object) -> str:
    """Return the path at which something stands in the values, which stand at paths themselves."""
    return next(
        (
            path + inner
            for path, value in values.items()
            if (inner := path_of(leaf, value, "")) or value is leaf
        ),
        "optimizer",
    )


def _failure(error: LeafError, values: dict[str, Any], device: torch.device) -> MoveError:
    where = _path_in(values, error.leaf)
    reason = reason_of(error.__cause__)
    msg = f"{where} could not be moved to {device}, and the optimizer is as it was: {reason}."
    return MoveError(msg, path=where.removeprefix("optimizer."), target=device)
