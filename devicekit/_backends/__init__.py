"""What this machine has: the only part that asks torch, driver and environment about hardware.

What asks is imported with the first question (`current_machine`); an import asks none.
"""

from devicekit._backends.current import current_machine, pretend, pretended, this_machine
from devicekit._backends.info import DeviceInfo
from devicekit._backends.names import PLUGINS, known_accelerators, needs_plugin

__all__ = [
    "PLUGINS",
    "DeviceInfo",
    "current_machine",
    "known_accelerators",
    "needs_plugin",
    "pretend",
    "pretended",
    "this_machine",
]
