"""Choose a device: the best one of this machine, or the one a --device flag names.

Shows `devices()`, what is here and why something cannot be used; `device()`, which checks what the
user asked for before anything is loaded; and `auto()`, which says why it chose what it chose.

Run it:

    python examples/01_choose_a_device.py
    python examples/01_choose_a_device.py --device cuda:1
"""

from __future__ import annotations

import argparse
import logging

import torch

import devicekit


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the devices that are here, and choose one.")
    parser.add_argument(
        "--device", default="auto", help="auto (the default), cpu, cuda, cuda:1, mps, xpu, ..."
    )
    args = parser.parse_args()

    # auto() logs its choice and the reason, once, at INFO.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("devicekit").setLevel(logging.INFO)

    try:
        device = devicekit.device(args.device)
    except devicekit.DeviceError as error:
        parser.error(str(error))  # prints the message without a traceback, and exits with status 2

    for info in devicekit.devices():
        print(f"{info.device!s:8} {info.name:32} {memory(info):24} {state(info)}")

    x = torch.arange(6.0, device=device)
    print(f"computing on {device}: the sum of 0 to 5 is {x.sum().item():.0f}")


def memory(info: devicekit.DeviceInfo) -> str:
    if info.total_memory is None:
        return "memory not known"
    total = f"{info.total_memory / 2**30:.0f} GiB"
    return total if info.free_memory is None else f"{info.free_memory / 2**30:.1f} of {total} free"


def state(info: devicekit.DeviceInfo) -> str:
    return "usable" if info.usable else f"not usable: {info.reason}"


if __name__ == "__main__":
    main()
