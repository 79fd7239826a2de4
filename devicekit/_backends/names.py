"""The names of the device types that there are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["PLUGINS", "known_accelerators", "known_types", "label", "needs_plugin"]

PLUGINS: Mapping[str, str] = {
    "hpu": "habana_frameworks.torch",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "npu": "torch_npu",
    "xla": "torch_xla",
}
"""Device types that come with a package of their own, and the package to import."""

_LABELS = {t: t.upper() for t in ("cuda", "xpu", "mps", "mtia", "hpu", "npu", "xla")}


def known_accelerators() -> tuple[str, ...]:
    """Return every accelerator type that torch can spell, CUDA first and a plugin's last."""
    return ("cuda", *known_types())


def known_types() -> tuple[str, ...]:
    """Return the accelerator types that torch may know besides CUDA; the plugin's last."""
    plugin = torch._C._get_privateuse1_backend_name()
    return ("xpu", "mps", "mtia", "hpu", plugin)


def label(device_type: str) -> str:
    """Return what people call a device type."""
    return _LABELS.get(device_type, device_type)


def needs_plugin(device_type: str) -> bool:
    """Return whether a type is served by a package of its own, not by a build of torch."""
    return device_type in PLUGINS or device_type == torch._C._get_privateuse1_backend_name()
