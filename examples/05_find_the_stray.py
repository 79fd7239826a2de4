"""Find the tensor that stayed behind: a model with a mask that is no buffer, found and mended.

Shows `check()`, which says before the call who is on the wrong device, and what to write; and
`inspect()`, which says where everything is.

Without an accelerator the model goes to "meta", where tensors have a device but no values: enough
to see it happen. Run it:

    python examples/05_find_the_stray.py
    python examples/05_find_the_stray.py --device cuda:1
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import devicekit


class Attention(nn.Module):
    """Attends to the past only, by a mask: a plain attribute, or a buffer once it is mended."""

    def __init__(self, width: int, length: int, *, mended: bool) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        mask = torch.ones(length, length).tril()
        if mended:
            self.register_buffer("mask", mask, persistent=False)  # moves along, is not saved
        else:
            self.mask = mask

    mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(self.mask == 0, float("-inf")).softmax(dim=-1)
        attended: Tensor = weights @ v
        return attended


def model(*, mended: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), Attention(width=8, length=5, mended=mended), nn.Linear(8, 2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Find the tensor that stayed behind, and mend it.")
    parser.add_argument(
        "--device", help="where to send the model (default: an accelerator, or meta)"
    )
    args = parser.parse_args()
    try:
        device = devicekit.auto() if args.device is None else devicekit.device(args.device)
    except devicekit.DeviceError as error:
        parser.error(str(error))  # prints the message without a traceback, and exits with status 2
    if args.device is None and device.type == "cpu":
        device = torch.device("meta")

    # As it is done everywhere: what is no parameter and no buffer stays where it is.
    broken = model(mended=False).to(device)
    x = torch.ones(3, 5, 4, device=device)

    print("== what check() says ==")
    try:
        devicekit.check(broken, x)
    except devicekit.DeviceMismatchError as error:
        print(error)

    print("\n== where everything is ==")
    print(devicekit.inspect(broken))

    print("\n== mended ==")
    whole = model(mended=True).to(device)
    devicekit.check(whole, x)  # raises if something is wrong
    y = whole(x)
    print(f"everything is on {devicekit.inspect(whole).device}")
    print(f"the output is on {y.device}, of shape {tuple(y.shape)}")


if __name__ == "__main__":
    main()
