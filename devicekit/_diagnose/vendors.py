"""What the system shows of each vendor's hardware, whatever torch can do with it."""

from __future__ import annotations

from typing import NamedTuple

from devicekit._backends import PLUGINS
from devicekit._diagnose.facts import Facts
from devicekit._diagnose.finding import several

__all__ = ["PLATFORMS", "Platform", "hardware"]


class Platform(NamedTuple):
    maker: str
    device_type: str
    build: str
    plugin: str = ""


PLATFORMS = {
    "nvidia": Platform("NVIDIA", "cuda", "CUDA"),
    "amd": Platform("AMD", "cuda", "ROCm"),
    "intel": Platform("Intel", "xpu", "XPU"),
    "habana": Platform("Habana", "hpu", "", PLUGINS["hpu"]),
    "huawei": Platform("Huawei", "npu", "", PLUGINS["npu"]),
}


def hardware(facts: Facts) -> dict[str, str]:
    """Return what the system shows of each vendor, in words."""
    survey, found = facts.survey, dict[str, str]()
    for vendor, number in survey.pci:
        found[vendor] = f"{several(number, f'{PLATFORMS[vendor].maker} device')} on its PCI bus"
    if "kfd" in survey.nodes:
        found.setdefault("amd", "an AMD GPU (its device file is there)")
    if "habana" in survey.nodes:
        found.setdefault("habana", "a Habana device (its device file is there)")
    if "davinci" in survey.nodes:
        found.setdefault("huawei", "a Huawei device (its device file is there)")
    if survey.driver and survey.driver.gpus:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in survey.driver.gpus))
        found["nvidia"] = f"{several(len(survey.driver.gpus), 'NVIDIA GPU')} ({names})"
    elif "nvidia" not in found and ("nvidia" in survey.nodes or survey.module):
        found["nvidia"] = "an NVIDIA GPU (its kernel module is loaded)"
    return found
