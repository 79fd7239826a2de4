"""One device, as everything above goes by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from devicekit._types import Reason

__all__ = ["DeviceInfo"]


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device of this machine.

    Attributes:
        device: The device, as a tensor on it reports it.
        name: What its maker calls it.
        total_memory: Its memory in bytes, or None where that is not known.
        free_memory: What of it is free, in bytes, or None where it cannot be known without making
            a context.
        capability: The compute capability of a CUDA device, `(major, minor)`, else None.
        bfloat16: Whether it computes in bfloat16 in hardware, or None where that is not known.
        tensor_cores: Whether it has matrix units such as NVIDIA's tensor cores, or None where that
            is not known.
        usable: Whether a tensor can be made and computed with there.
        reason: Why it is not usable, or None.

    Examples:
        >>> import devicekit
        >>> devicekit.devices()[-1].device
        device(type='cpu')
    """

    device: torch.device
    name: str
    total_memory: int | None = None
    free_memory: int | None = None
    capability: tuple[int, int] | None = None
    bfloat16: bool | None = None
    tensor_cores: bool | None = None
    usable: bool = True
    reason: Reason | None = None
