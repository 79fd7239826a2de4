"""Read what accelerate's hooks say: where a sub-module is executed, and who holds its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from devicekit._backends import current_machine

__all__ = ["Rule", "declared_device", "flattened", "hooks_of", "modules_of", "rule_of"]


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield accelerate's hooks in a module, with the name of the sub-module each is on."""
    for name, part in modules_of(module):
        hook = part.__dict__.get("_hf_hook")
        if hook is not None:
            yield from ((name, single) for single in flattened(hook))


def modules_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what `named_modules` does, whose types torch leaves open."""
    yield from cast("Iterator[tuple[str, nn.Module]]", module.named_modules())


def flattened(hook: Any) -> tuple[Any, ...]:
    """Return the parts of one of accelerate's hooks, which may be several in a row."""
    return tuple(getattr(hook, "hooks", (hook,)))


def declared_device(hook: Any) -> torch.device | None:
    """Return the execution device that one of accelerate's hooks declares."""
    for part in flattened(hook):
        declared = getattr(part, "execution_device", None)
        if declared is not None:
            return _canonical(torch.device(declared))
    return None


def _canonical(device: torch.device) -> torch.device:
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if cast("int | None", device.index) is None:
        return torch.device(device.type, current_machine().current_index(device.type))
    return device


class Rule:
    """Where the tensors of a sub-module may be while no forward runs, by its hook.

    Attributes:
        device: Where they are executed.
        offloads: Whether they are placeholders on meta until then.
        moves: Whether the hook itself moves them to and fro, so that they may be anywhere.
    """

    __slots__ = ("device", "moves", "offloads")

    def __init__(self, device: torch.device, *, offloads: bool, moves: bool) -> None:
        self.device = device
        self.offloads = offloads
        self.moves = moves

    def allows(self, device: torch.device) -> bool:
        """Return whether a tensor may be on a device."""
        return self.moves or device == self.device or (self.offloads and device.type == "meta")


def rule_of(hook: Any) -> Rule | None:
    """Return the rule that one of accelerate's hooks sets, or None where it sets none."""
    device = declared_device(hook)
    if device is None:
        return None
    parts = [part for part in flattened(hook) if declared_device(part) is not None]
    return Rule(
        device,
        offloads=any(getattr(part, "offload", False) for part in parts),
        # `CpuOffload` and its kin have no such attribute: they carry the module across and back.
        moves=not any(hasattr(part, "offload") for part in parts),
    )
