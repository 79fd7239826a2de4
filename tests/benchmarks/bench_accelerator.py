"""What a training loop costs on an accelerator, by the way its batches get there. Run it by hand:

    python tests/benchmarks/bench_accelerator.py

Two tables. The loop: time per step with batches that are there already (`resident`, the floor), by
hand-written `.to`, by `move` and `prefetch`, and by what accelerate, Lightning Fabric and timm do;
libraries that are not installed are left out. Many small tensors: `.to` for each, `move`, and a
copy that puts all of one dtype into one block first, which `move` does not do.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))

from pairing import verdict

import devicekit

Batch = dict[str, Tensor]
Way = Callable[[DataLoader[Batch], nn.Module, torch.device], Iterable[Batch]]

SMALL_TENSORS = 528  # of 150 kB in all, as in the evaluation of NVIDIA's multi_tensor_copier


# ---- ways to bring a batch to the device ---------------------------------------------------------


def by_hand(loader: DataLoader[Batch], model: nn.Module, device: torch.device) -> Iterator[Batch]:
    for batch in loader:
        yield {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def by_move(loader: DataLoader[Batch], model: nn.Module, device: torch.device) -> Iterator[Batch]:
    for batch in loader:
        yield devicekit.move(model, batch)


def by_prefetch(
    loader: DataLoader[Batch], model: nn.Module, device: torch.device
) -> Iterable[Batch]:
    return devicekit.prefetch(loader, model)


def by_accelerate(
    loader: DataLoader[Batch], model: nn.Module, device: torch.device
) -> Iterable[Batch]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    settings = DataLoaderConfiguration(non_blocking=True)
    return Accelerator(dataloader_config=settings).prepare_data_loader(loader)  # type: ignore[no-any-return]


def by_fabric(loader: DataLoader[Batch], model: nn.Module, device: torch.device) -> Iterable[Batch]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=device.type, devices=[device.index or 0])
    return fabric.setup_dataloaders(loader)  # type: ignore[return-value]


def as_timm(loader: DataLoader[Batch], model: nn.Module, device: torch.device) -> Iterator[Batch]:
    """One batch ahead on a stream of its own, as timm's `PrefetchLoader` has it."""
    module = torch.get_device_module(device.type)
    stream = module.Stream(device)
    ready: Batch | None = None
    for batch in loader:
        with module.stream(stream):
            following = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        if ready is not None:
            yield ready
        module.current_stream(device).wait_stream(stream)
        ready = following
    if ready is not None:
        yield ready


WAYS: dict[str, tuple[Way, str | None]] = {
    "by hand": (by_hand, None),
    "move": (by_move, None),
    "prefetch": (by_prefetch, None),
    "accelerate": (by_accelerate, "accelerate"),
    "fabric": (by_fabric, "lightning_fabric"),
    "as timm": (as_timm, None),
}


# ---- the loop ------------------------------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def batches(number: int, size: int, pixels: int) -> list[Batch]:
    """Return batches in pinned memory, so that what is measured is the way to the device."""
    made: list[Batch] = []
    for _ in range(number):
        images = torch.randn(size, 3, pixels, pixels)
        digits = torch.randint(10, (size,))
        made.append({"image": images.pin_memory(), "digit": digits.pin_memory()})
    return made


def seconds_per_step(
    loader: Iterable[Batch],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    repeat: int,
) -> float:
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    steps = 0
    for batch in loader:
        for _ in range(repeat):  # more of it, where the copy would take longer than the work
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["digit"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        steps += 1
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - start) / steps


def seconds_of_a_copy(made: Sequence[Batch], device: torch.device) -> float:
    times: list[float] = []
    for batch in made:
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        devicekit.move(batch, device)
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def loop(device: torch.device, *, steps: int, size: int, pixels: int, rounds: int) -> None:
    """Print the time per step for each way, all ways in turn, in random order."""
    made = batches(steps, size, pixels)
    model = devicekit.move(network(), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    resident = devicekit.move(made, device)
    ways = {
        name: way
        for name, (way, library) in WAYS.items()
        if library is None or importlib.util.find_spec(library) is not None
    }
    copy = seconds_of_a_copy(made, device)
    seconds_per_step(resident, model, optimizer, device, 1)  # to warm up
    work = seconds_per_step(resident, model, optimizer, device, 1)
    for repeat in (1, max(2, int(3 * copy / work) + 1)):
        times: dict[str, list[float]] = {"resident": [], **{name: [] for name in ways}}
        for _ in range(rounds + 1):
            for name in random.sample(list(times), len(times)):
                loader = DataLoader(made, batch_size=None)
                source = resident if name == "resident" else ways[name](loader, model, device)
                times[name].append(seconds_per_step(source, model, optimizer, device, repeat))
        found = {name: statistics.median(t[1:]) for name, t in times.items()}
        print(f"\n{repeat} updates for each batch; a copy takes {copy * 1e3:.2f} ms")
        for name, took in found.items():
            print(f"  {name:12s}{took * 1e3:9.2f} ms{took / found['by hand']:8.2f} of by hand")
        print(f"  move: {verdict(found['move'] / found['by hand'], 1.0)} (of by hand)")
        if found["resident"] > copy:
            hidden = 1 - max(0.0, found["prefetch"] - found["resident"]) / copy
            meets = "meets" if hidden >= 0.9 else "falls short of"
            print(f"  prefetch hides {hidden:.0%} of the copy: {meets} 90%")


# ---- many small tensors --------------------------------------------------------------------------


def small_tensors() -> list[Tensor]:
    dtypes = (torch.float32, torch.int64, torch.float16)
    return [torch.ones(61, dtype=dtypes[i % 3]) for i in range(SMALL_TENSORS)]


def coalesced(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Send all of a dtype as one block; what comes back are views of it."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(i)
    moved: list[Any] = [None] * len(tensors)
    for indices in by_dtype.values():
        group = [tensors[i] for i in indices]
        block = torch._utils._flatten_dense_tensors(group).to(device)
        for i, part in zip(
            indices, torch._utils._unflatten_dense_tensors(block, group), strict=True
        ):
            moved[i] = part
    return moved


def many_small(device: torch.device, rounds: int) -> None:
    tensors = small_tensors()
    contestants: dict[str, Callable[[], Any]] = {
        "by hand": lambda: [tensor.to(device) for tensor in tensors],
        "move": lambda: devicekit.move(tensors, device),
        "coalesced": lambda: coalesced(tensors, device),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 3):
        for name in random.sample(list(contestants), len(contestants)):
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            contestants[name]()
            torch.accelerator.synchronize(device)
            times[name].append(time.perf_counter() - start)
    found = {name: statistics.median(t[3:]) for name, t in times.items()}
    print(f"\n{len(tensors)} tensors of {sum(t.nbytes for t in tensors) / 1e3:.0f} kB in all")
    for name, took in found.items():
        print(f"  {name:12s}{took * 1e3:9.3f} ms{took / found['by hand']:8.2f} of by hand")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=30, help="batches in an epoch")
    parser.add_argument("--size", type=int, default=128, help="images in a batch")
    parser.add_argument("--pixels", type=int, default=224, help="height and width of an image")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(arguments)
    device = devicekit.device(args.device)
    if device.type == "cpu":
        parser.error("there is no accelerator here, and nothing to measure")
    name = next(info.name for info in devicekit.devices() if info.device == device)
    print(f"torch {torch.__version__}, {name}")
    loop(device, steps=args.steps, size=args.size, pixels=args.pixels, rounds=args.rounds)
    many_small(device, args.rounds)


if __name__ == "__main__":
    main()
