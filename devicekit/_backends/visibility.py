"""What the visibility variables leave of the devices that a machine has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["VARIABLES", "select", "variables_set", "visible"]

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "hpu": ("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"),
}
"""The variables that hide or renumber devices, by platform, in the order of their effect."""


def variables_set(platform: str, environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables of a platform that are set, with their values."""
    return tuple((name, environ[name]) for name in VARIABLES.get(platform, ()) if name in environ)


def visible(platform: str, environ: Mapping[str, str], uuids: Sequence[str]) -> list[int]:
    """Return which of the devices the variables of a platform leave, in their new order.

    Under ROCm each variable numbers what the one before has left, and HIP's own stands in for
    CUDA's.

    Args:
        platform: `"cuda"`, `"rocm"` or `"xpu"`; for others nothing is known to hide a device.
        environ: The environment variables.
        uuids: The UUID of each device, in the order in which the driver numbers them.
    """
    left = list(range(len(uuids)))
    if platform not in ("cuda", "rocm", "xpu"):
        return left
    for name, value in variables_set(platform, environ):
        if name == "ONEAPI_DEVICE_SELECTOR" or (
            name == "CUDA_VISIBLE_DEVICES"
            and platform == "rocm"
            and "HIP_VISIBLE_DEVICES" in environ
        ):
            continue
        if name == "ZE_AFFINITY_MASK":
            left = _unmasked(value, len(uuids))
        else:
            left = [left[i] for i in select(value, [uuids[i] for i in left])]
    return left


def select(value: str, uuids: Sequence[str]) -> list[int]:
    """Return which of the devices `CUDA_VISIBLE_DEVICES=value` leaves, in their new order.

    CUDA's own rules: the list ends at the first entry that names no device, a device named twice
    hides them all, numbers are read the way C reads them (`"0;1"` is 0), and a list of UUIDs takes
    any unambiguous beginning of one. A MIG entry names a part of a device, which cannot be told
    from the UUIDs of whole ones: it selects nothing here.

    Args:
        value: The value of the variable.
        uuids: The UUID of each device, in the order in which CUDA numbers them.

    Examples:
        >>> [select(value, ["GPU-a", "GPU-b"]) for value in ("1,0", "0,9,1", "0,0")]
        [[1, 0], [0], []]
    """
    by_uuid = value.lstrip().startswith("GPU-")
    chosen: list[int] = []
    for entry in value.split(","):
        index = _by_uuid(entry.strip(), uuids) if by_uuid else _by_number(entry)
        if index is None or index >= len(uuids):
            break
        if index in chosen:
            return []
        chosen.append(index)
    return chosen


def _by_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _by_number(entry: str) -> int | None:
    """Read a number as C's `strtoul` does: blanks, a sign, then as many digits as there are."""
    match = re.match(r"\s*([+-]?)0*([0-9]+)", entry)
    number = int(match.group(2)[:9]) if match else -1  # Python limits the digits
    return None if number < 0 or (match and match.group(1) == "-" and number) else number


def _unmasked(mask: str, count: int) -> list[int]:
    """Return what Level Zero's mask leaves, in its own order; `0.1` is a tile of device 0."""
    numbers = {_by_number(entry) for entry in mask.split(",")}
    return [i for i in range(count) if i in numbers or not mask.strip()]
