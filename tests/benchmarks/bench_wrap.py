"""What `wrap` costs in each forward, beside a hook that does nothing and accelerate's own hook.

Run it by hand:

    python tests/benchmarks/bench_wrap.py

accelerate is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from pairing import measure, ratios, verdict

import devicekit

HOOK_BAR = 1.6  # of the forward with a hook that does nothing
ACCELERATE_BAR = 2.0  # times faster than accelerate


class Identity(nn.Module):
    """A model that costs nothing but the call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x

    def encode(self, x: Tensor, mask: Tensor) -> Tensor:
        return x


def do_nothing(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def hooked() -> nn.Module:
    model = Identity()
    model.register_forward_pre_hook(do_nothing, with_kwargs=True)
    return model


def contestants() -> dict[str, Callable[..., object]]:
    """Return what is called with one positional and one keyword tensor, by name."""
    found: dict[str, Callable[..., object]] = {
        "bare": Identity(),
        "hook": hooked(),
        "wrap": devicekit.wrap(Identity()),
        "wrap, outputs": devicekit.wrap(Identity(), outputs="cpu"),
        "wrap, inputs": devicekit.wrap(Identity(), outputs="inputs"),
        "method": devicekit.wrap(Identity(), methods=("encode",)).encode,
    }
    try:
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    except ImportError as error:
        print(f"without accelerate: {error}")
    else:
        hook = AlignDevicesHook(execution_device="cpu")
        found["accelerate"] = add_hook_to_module(Identity(), hook)
    return found


def call(function: Callable[..., object], x: Tensor) -> Callable[[], object]:
    return lambda: function(x, mask=x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what wrap costs in each forward.")
    parser.add_argument("--rounds", type=int, default=61)
    rounds = parser.parse_args().rounds

    x = torch.ones(2)
    functions = {name: call(function, x) for name, function in contestants().items()}
    times = measure(functions, rounds=rounds)

    print(f"{'':14} {'us':>6} {'of hook':>8}")
    of_hook = ratios(times, "hook")
    for name, ratio in of_hook.items():
        told = f"  {verdict(ratio, HOOK_BAR)}" if name == "wrap" else ""
        print(f"{name:14} {statistics.median(times[name]) / 1000:6.2f} {ratio:8.2f}{told}")
    if "accelerate" in times:
        gain = ratios(times, "wrap")["accelerate"]
        told = "meets" if gain >= ACCELERATE_BAR else "falls short of"
        print(f"wrap is {gain:.2f} times faster than accelerate: {told} {ACCELERATE_BAR:g}")


if __name__ == "__main__":
    main()
