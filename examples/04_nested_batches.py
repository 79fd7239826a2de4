"""Move batches of any structure, and get back what was sent: the same types, the same sharing.

Shows that a dataclass stays that dataclass, that one tensor met twice stays one tensor, that what
is no tensor passes through, and that a batch which is in the right place already is not copied.

Run it:

    python examples/04_nested_batches.py
    python examples/04_nested_batches.py --device cuda
"""

from __future__ import annotations

import argparse
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import devicekit


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Scene:
    image: Tensor
    points: list[Point]
    by_label: defaultdict[str, list[Tensor]]
    extras: OrderedDict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description="Move a nested batch.")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:1, meta, ...")
    args = parser.parse_args()
    try:
        device = devicekit.device(args.device)
    except devicekit.DeviceError as error:
        parser.error(str(error))

    scene = make_scene()
    moved = devicekit.move(scene, device)

    print(f"from {devicekit.device_of(scene)} to {devicekit.device_of(moved)}")
    print(f"types kept: {type(moved).__name__}, {type(moved.points[0]).__name__}")
    print(f"factory of the defaultdict kept: {moved.by_label['new'] == []}")
    print(f"one tensor met twice is one tensor: {moved.by_label['cat'][0] is moved.image}")
    print(f"what is no tensor passes through: {moved.extras['file']!r}")
    print(f"moved again it is the very same object: {devicekit.move(moved, device) is moved}")


def make_scene() -> Scene:
    image = torch.rand(3, 8, 8)
    return Scene(
        image=image,
        points=[Point(torch.tensor(1.0), torch.tensor(2.0))],
        by_label=defaultdict(list, cat=[image]),
        extras=OrderedDict(file="scene-1.png", mask=torch.ones(8, 8)),
    )


if __name__ == "__main__":
    main()
