"""Where one of two processes is put by a library and by `auto()`; see test_launchers.py.

On the machine that `DEVICEKIT_TEST_MACHINE` names, under torchrun. Prints the two devices.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import machines

if __name__ == "__main__":  # pytest reads this file too, for doctests
    machines.install()

import torch

import devicekit


def by_accelerate(device: torch.device) -> torch.device:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    gloo = InitProcessGroupKwargs(backend="gloo")  # the fake GPUs have no NCCL
    return Accelerator(cpu=device.type == "cpu", kwargs_handlers=[gloo]).device


def by_fabric(device: torch.device) -> torch.device:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    fabric = Fabric(
        accelerator=device.type,
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo"),
    )
    fabric.launch()
    return fabric.device


if __name__ == "__main__":
    core: Any = torch._C
    core._show_config = lambda: ""  # torch asks the CUDA library for it, of which a fake has none
    ours = devicekit.auto()
    theirs = {"accelerate": by_accelerate, "fabric": by_fabric}[sys.argv[1]](ours)
    sys.stdout.write(f"rank {os.environ['LOCAL_RANK']}: {ours} {devicekit.device(theirs)}\n")
    torch.distributed.destroy_process_group()
