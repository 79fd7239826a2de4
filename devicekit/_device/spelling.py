"""How devices are written, and what was meant where they are written wrongly.

The text is read here and not by torch, which keeps the index in eight bits:
`torch.device("cuda:256")` is `cuda:0`.
"""

from __future__ import annotations

import difflib
import re

import torch

from devicekit._backends import PLUGINS, known_accelerators
from devicekit.errors import InvalidDeviceError

__all__ = ["MAX_INDEX", "parse", "parse_type"]

MAX_INDEX = 127
"""The largest index that a `torch.device` can hold."""

_SPELLING = re.compile(r"([a-z][a-z0-9_]*)(?::(0|[1-9][0-9]*))?")

# Types that torch knows and no backend of today's serves (c10/core/DeviceType.h).
_UNUSED_TYPES = (
    "fpga",
    "ideep",
    "ipu",
    "lazy",
    "maia",
    "mkldnn",
    "opencl",
    "opengl",
    "ve",
    "vulkan",
)

_ALIASES = {
    "amd": "cuda",
    "directml": "privateuseone",
    "dml": "privateuseone",
    "apple": "mps",
    "ascend": "npu",
    "gaudi": "hpu",
    "geforce": "cuda",
    "habana": "hpu",
    "hip": "cuda",
    "host": "cpu",
    "intel": "xpu",
    "mac": "mps",
    "metal": "mps",
    "nvidia": "cuda",
    "radeon": "cuda",
    "rocm": "cuda",
    "tpu": "xla",
}


def parse(spec: object) -> tuple[str | None, int | None]:
    """Return the device type and the index that `spec` names; None for what it leaves open.

    Raises:
        InvalidDeviceError: It names no device.
    """
    if isinstance(spec, torch.device):
        return _parse_device(spec)
    if isinstance(spec, int) and not isinstance(spec, bool):
        if spec < 0:
            msg = (
                f"{spec!r} is not a device: indices start at 0. "
                f"Write 'cpu' for the CPU, or call devicekit.auto()."
            )
            raise InvalidDeviceError(msg)
        return None, spec
    if not isinstance(spec, str):
        raise InvalidDeviceError(_not_text(spec))
    match = _SPELLING.fullmatch(spec)
    if match is None or match.group(1) not in _types():
        raise InvalidDeviceError(_not_a_device(spec))
    index = match.group(2)
    return match.group(1), None if index is None else int(index[:9])  # Python limits the digits


def parse_type(name: object) -> str:
    """Return `name` if it is a device type without an index.

    Raises:
        InvalidDeviceError: It is not.
    """
    if isinstance(name, str) and name in _types():
        return name
    msg = (
        f"{name!r} is not a device type: expected a name such as 'cuda', 'xpu', 'mps' or 'cpu', "
        f"without an index."
    )
    raise InvalidDeviceError(msg)


def _types() -> tuple[str, ...]:
    return ("cpu", "meta", *known_accelerators(), *PLUGINS, *_UNUSED_TYPES)


def _parse_device(spec: torch.device) -> tuple[str, int | None]:
    if spec.index is not None and not 0 <= spec.index <= MAX_INDEX:
        msg = (
            f"{spec!r} is not a device: torch keeps indices from 0 to {MAX_INDEX}, so the number "
            f"it was made from is lost. Pass the text to devicekit.device() instead."
        )
        raise InvalidDeviceError(msg)
    return spec.type, spec.index


def _not_text(spec: object) -> str:
    expected = "expected a text such as 'cuda:0', the index of an accelerator, or a torch.device"
    if spec is None:
        return f"None is not a device: {expected}. Call devicekit.auto() for the best device here."
    kind = type(spec).__name__
    hint = f" Did you mean {spec.decode('ascii', 'replace')!r}?" if isinstance(spec, bytes) else ""
    return f"{spec!r} is not a device but of type {kind}: {expected}.{hint}"


def _not_a_device(spec: str) -> str:
    if spec.strip().lower() in ("gpu", "accelerator"):
        return (
            f"{spec!r} is not a device: expected the kind of GPU. Write 'cuda' for one of NVIDIA "
            f"or AMD, 'xpu' for Intel, 'mps' for Apple, or call devicekit.auto()."
        )
    if re.search(r"[,;\-]\s*[0-9]", spec) and re.search(r"[0-9]\s*[,;\-]", spec):
        return f"{spec!r} is not a device but several: expected one, such as 'cuda:0'."
    if re.search(r":\s*-\s*[0-9]", spec):
        return f"{spec!r} is not a device: indices start at 0. Write an index such as in 'cuda:0'."
    meant = _meant(spec)
    if meant is not None:
        return f"{spec!r} is not a device. Did you mean {meant!r}?"
    return (
        f"{spec!r} is not a device: expected 'cpu', 'cuda', 'xpu', 'mps' or 'meta', with an index "
        f"where there are several ('cuda:1'), or 'auto'. "
        f"Call devicekit.devices() for those that are here."
    )


def _meant(spec: str) -> str | None:
    """Return what was probably meant: letters, whatever stands between, and a number."""
    match = re.fullmatch(r"[\s'\"(]*([A-Za-z_]*?)[\s:=_.\-/@#\[(]*([0-9]*)[\s:\])'\"]*", spec)
    if match is None:
        return None
    name, number = match.group(1).lower(), match.group(2)
    if not name and not number:
        return None
    if name in ("", "gpu", "device"):
        name = next(iter(known_accelerators()))
    name = _ALIASES.get(name, name)
    if name not in _types():
        near = difflib.get_close_matches(name, [*_types(), *_ALIASES], n=1, cutoff=0.6)
        if not near:
            return None
        name = _ALIASES.get(near[0], near[0])
    return f"{name}:{int(number)}" if number else name
