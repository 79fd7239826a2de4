"""What this machine has: the only part that asks torch, driver and environment about hardware."""

from devicekit._backends.driver import Driver, Gpu
from devicekit._backends.facts import Accelerator, DeviceInfo
from devicekit._backends.generic import PLUGINS, needs_plugin
from devicekit._backends.machine import (
    Machine,
    current_machine,
    known_accelerators,
    pretend,
    pretended,
)
from devicekit._backends.memory import parse_size
from devicekit._backends.visibility import VARIABLES, select

__all__ = [
    "PLUGINS",
    "VARIABLES",
    "Accelerator",
    "DeviceInfo",
    "Driver",
    "Gpu",
    "Machine",
    "current_machine",
    "known_accelerators",
    "needs_plugin",
    "parse_size",
    "pretend",
    "pretended",
    "select",
]
