"""The CPU, which every machine has."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from devicekit._backends.info import DeviceInfo

__all__ = ["read"]


def read() -> DeviceInfo:
    """Return the CPU with the memory of the machine."""
    return DeviceInfo(
        device=torch.device("cpu"),
        name=_name(),
        total_memory=_pages("SC_PHYS_PAGES"),
        free_memory=_available_memory(),
        tensor_cores=False,
    )


def _name() -> str:
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _available_memory() -> int | None:
    """Return Linux's estimate of what can be had without swapping; elsewhere the free pages."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _pages("SC_AVPHYS_PAGES")


def _pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    # Windows has no sysconf, macOS no SC_AVPHYS_PAGES.
    except (AttributeError, OSError, ValueError):
        return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
