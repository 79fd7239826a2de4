"""How devices are written, and what was meant where they are written wrongly.

The text is read here and not by torch, which keeps the index in eight bits:
`torch.device("cuda:256")` is `cuda:0`.
"""

from __future__ import annotations

import difflib
import operator
import re
from typing import cast

import torch

from devicekit._backends import PLUGINS, current_machine, known_accelerators
from devicekit.errors import InvalidDeviceError

__all__ = ["MAX_INDEX", "UNUSED_TYPES", "meant", "parse", "parse_type", "shown"]

MAX_INDEX = 127
"""The largest index that a `torch.device` can hold."""

_SPELLING = r"([a-z][a-z0-9_]*)(?::(0|[1-9][0-9]*))?"

UNUSED_TYPES = (
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
"""Types that torch knows and no backend of today's serves (c10/core/DeviceType.h)."""

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
    if isinstance(spec, str):
        match = re.fullmatch(_SPELLING, spec)
        if match is None or match.group(1) not in _types():
            raise InvalidDeviceError(_not_a_device(spec))
        index = match.group(2)
        return match.group(1), None if index is None else int(index[:9])  # Python limits the digits
    number = _index(spec)
    if number is None:
        raise InvalidDeviceError(_not_text(spec))
    if number < 0:
        raise InvalidDeviceError(_negative(spec))
    return None, number


def parse_type(name: object) -> str:
    """Return `name` if it is a device type that can be preferred, without an index.

    Raises:
        InvalidDeviceError: It is not.
    """
    if isinstance(name, str) and name in _types() and name != "meta":
        return str.__str__(name)
    msg = (
        f"{shown(name)} is not a device type: expected a name such as 'cuda', 'xpu', 'mps' or "
        f"'cpu', without an index."
    )
    raise InvalidDeviceError(msg)


def meant(spec: str) -> str | None:
    """Return what was probably meant: letters, whatever stands between, and a number."""
    parts = _parts(spec)
    if parts is None:
        return None
    name, number = parts
    if name in _ANY_TYPE:
        types = current_machine().accelerator_types()
        if not types:
            return None
        name = types[0]
    name = _ALIASES.get(name, name)
    candidates = ("cpu", "meta", *known_accelerators(), *PLUGINS, "auto")
    if name not in candidates:
        near = difflib.get_close_matches(name, [*candidates, *_ALIASES], n=1, cutoff=0.7)
        if not near:
            return None
        name = _ALIASES.get(near[0], near[0])
    return f"{name}:{int(number)}" if number and name not in ("cpu", "meta", "auto") else name


def shown(value: object) -> str:
    """Return `repr(value)`, shortened; never raises, whatever the value is."""
    try:
        text = repr(value)
    except Exception:  # an int has too many digits for Python, another object anything at all
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}"


def _types() -> tuple[str, ...]:
    return ("cpu", "meta", *known_accelerators(), *PLUGINS, *UNUSED_TYPES)


def _index(spec: object) -> int | None:
    """Return what `spec` counts, as NumPy's integers do too; None for other things and truths."""
    if isinstance(spec, (bool, torch.Tensor)):
        return None
    try:
        return int(operator.index(spec))  # type: ignore[arg-type]
    except Exception:  # whatever an object may raise, it is no number
        return None


def _parse_device(spec: torch.device) -> tuple[str, int | None]:
    if spec.type not in _types():  # torch's internal "hip", which is "cuda" to its users
        raise InvalidDeviceError(_not_a_device(str(spec)))
    index = cast("int | None", spec.index)  # torch annotates it as an int
    if index is not None and not 0 <= index <= MAX_INDEX:
        msg = (
            f"{spec!r} is not a device: torch keeps indices from 0 to {MAX_INDEX}, so the number "
            f"it was made from is lost. Pass the text to devicekit.device() instead."
        )
        raise InvalidDeviceError(msg)
    return spec.type, index


def _not_text(spec: object) -> str:
    expected = "expected a text such as 'cuda:0', the index of an accelerator, or a torch.device"
    if spec is None:
        return f"None is not a device: {expected}. Call devicekit.auto() for the best device here."
    kind = type(spec).__name__
    hint = (
        f" Did you mean {shown(spec.decode('ascii', 'replace'))}?"
        if isinstance(spec, bytes)
        else ""
    )
    return f"{shown(spec)} is not a device but of type {kind}: {expected}.{hint}"


def _negative(spec: object) -> str:
    return (
        f"{shown(spec)} is not a device: indices start at 0. "
        f"Write 'cpu' for the CPU, or call devicekit.auto()."
    )


def _not_a_device(spec: str) -> str:
    this = shown(spec)
    if spec.strip().lower() in ("gpu", "accelerator"):
        return (
            f"{this} is not a device: expected the kind of GPU. Write 'cuda' for one of NVIDIA "
            f"or AMD, 'xpu' for Intel, 'mps' for Apple, or call devicekit.auto()."
        )
    if re.match(r"\s*(GPU|MIG)-", spec):
        return (
            f"{this} is not a device but the UUID of one: expected its number, such as in "
            f"'cuda:0'. Set CUDA_VISIBLE_DEVICES to the UUID before the program starts, and "
            f"write 'cuda'."
        )
    if re.search(r"\w\s*[,;]\s*\w|[0-9]\s*-\s*[0-9]", spec):
        return f"{this} is not a device but several: expected one, such as 'cuda:0'."
    if re.search(r"(^|:)\s*-\s*[0-9]", spec):
        return _negative(spec)
    hint = meant(spec)
    if hint is not None:
        return f"{this} is not a device. Did you mean {hint!r}?"
    parts = _parts(spec)
    if parts is not None and parts[0] in _ANY_TYPE:
        return (
            f"{this} is not a device: expected a type before the index, and this build of torch "
            f"({torch.__version__}) has no accelerator. Write 'cpu', or call devicekit.auto()."
        )
    return (
        f"{this} is not a device: expected 'cpu', 'cuda', 'xpu', 'mps' or 'meta', with an index "
        f"where there are several ('cuda:1'), or 'auto'. "
        f"Call devicekit.devices() for those that are here."
    )


_ANY_TYPE = ("", "gpu", "device")  # what may stand for the accelerator of this machine


def _parts(spec: str) -> tuple[str, str] | None:
    """Return the letters and the number of a text, whatever stands between; None for others."""
    if len(spec) > 40:  # nobody's slip of the pen, and slow to match
        return None
    match = re.fullmatch(r"[\s'\"(]*([A-Za-z_]*?)[\s:=_.\-/@#\[(]*([0-9]*)[\s:\])'\"]*", spec)
    if match is None or not any(match.groups()):
        return None
    return match.group(1).lower(), match.group(2)
