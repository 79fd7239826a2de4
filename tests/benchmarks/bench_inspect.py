"""What `inspect`, `check` and `device_of` cost, beside what they stand for. Run it by hand:

python tests/benchmarks/bench_inspect.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from pairing import measure, ratios, verdict

import devicekit

CPU = torch.device("cpu")


class Block(nn.Module):
    """A module as people write them: with attributes of its own, and one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.size = (4, 4)
        self.scale = 2.0


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "1,000 Linear, 1,000 parameters": lambda: nn.Sequential(
        *(nn.Linear(4, 4, bias=False) for _ in range(1_000))
    ),
    "1,000 modules with attributes": lambda: nn.Sequential(*(Block() for _ in range(1_000))),
    "200 Conv2d + BatchNorm2d": lambda: nn.Sequential(
        *(m for _ in range(200) for m in (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    ),
}


def main() -> None:
    for name, make in MODELS.items():
        model = make()
        batch = torch.ones(1, 4)
        times = measure(
            {
                "model.to(device)": lambda m=model: m.to(CPU),  # type: ignore[misc]
                "inspect(model)": lambda m=model: devicekit.inspect(m),  # type: ignore[misc]
                "str(inspect(model))": lambda m=model: str(devicekit.inspect(m)),  # type: ignore[misc]
                "check(model, x)": lambda m=model, x=batch: devicekit.check(m, x),  # type: ignore[misc]
            }
        )
        print(name)
        for contestant, ratio in ratios(times, "model.to(device)").items():
            milliseconds = sorted(times[contestant])[len(times[contestant]) // 2] / 1e6
            # The bar is for inspect of 1,000 modules; the others are told for the documentation.
            judged = (
                verdict(ratio, 1.0)
                if contestant.startswith("insp") and name.startswith("1,000")
                else ""
            )
            print(f"  {contestant:22} {milliseconds:7.2f} ms  {ratio:5.2f}  {judged}".rstrip())

    model = MODELS["1,000 Linear, 1,000 parameters"]()
    times = measure(
        {
            "next(model.parameters()).device": lambda: next(model.parameters()).device,
            "device_of(model)": lambda: devicekit.device_of(model),
        }
    )
    print("the device of a model")
    for contestant, ratio in ratios(times, "next(model.parameters()).device").items():
        nanoseconds = sorted(times[contestant])[len(times[contestant]) // 2]
        print(f"  {contestant:32} {nanoseconds:7.0f} ns  {ratio:5.2f}")


if __name__ == "__main__":
    main()
