"""Whether a build of torch has kernels for a device's architecture."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["cuda_architecture_supported", "rocm_architecture_supported", "tensor_cores"]


def cuda_architecture_supported(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether kernels built for `architectures` run on a device of this compute capability.

    NVIDIA's rules (CUDA C++ programming guide, "Application compatibility"): a cubin `sm_XY` runs
    on devices of the same major capability and an equal or higher minor one; PTX `compute_XY` is
    compiled by the driver for every device from X.Y on; `sm_XYa` and `compute_XYa` run on exactly
    X.Y, and `f` ones within their family, which is the major capability.
    An empty list means that the build does not say: then nothing is refused.

    Examples:
        >>> cuda_architecture_supported((8, 6), ["sm_80"])
        True
        >>> cuda_architecture_supported((6, 1), ["sm_75"])
        False
        >>> cuda_architecture_supported((12, 0), ["sm_90", "compute_90"])
        True
    """
    parsed = [m for m in map(_ARCHITECTURE.fullmatch, architectures) if m]
    if not parsed:
        return True
    return any(_runs(capability, *m.groups()) for m in parsed)


def _runs(capability: tuple[int, int], kind: str, number: str, suffix: str) -> bool:
    built = divmod(int(number), 10)
    if suffix == "a":
        return capability == built
    if kind == "compute" and not suffix:
        return capability >= built
    return capability[0] == built[0] and capability[1] >= built[1]


_ARCHITECTURE = re.compile(r"(sm|compute)_([0-9]{2,3})([af]?)")


def rocm_architecture_supported(architecture: str, architectures: Sequence[str]) -> bool:
    """Return whether kernels built for `architectures` run on an AMD GPU of this architecture.

    Args:
        architecture: What the driver says, with its features: `"gfx90a:sramecc+:xnack-"`.
        architectures: What the build has: names (`"gfx942"`) and families (`"gfx11-generic"`).
    """
    name = architecture.partition(":")[0]
    if not name or not architectures:
        return True
    return any(
        name == built.partition(":")[0]
        or (
            built.endswith("-generic")
            and name.startswith(built.removesuffix("-generic").replace("-", ""))
        )
        for built in architectures
    )


def tensor_cores(name: str, capability: tuple[int, int]) -> bool:
    """Return whether an NVIDIA GPU has tensor cores: all from 7.0 on but the GTX 16 series."""
    return capability >= (7, 0) and "GTX 16" not in name
