"""What `move` costs, beside code written by hand and beside the peers. Run it by hand:

    python tests/benchmarks/bench_move.py

Peers that are not installed are left out: accelerate, lightning-fabric, pytorch-ignite, optree.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import importlib.util
import math
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from pairing import measure, ratios, verdict
from workloads import WORKLOADS

import devicekit

Mover = Callable[[Any, torch.device], Any]
Contestants = dict[str, dict[str, Callable[[], object]]]

CPU, META = torch.device("cpu"), torch.device("meta")


def peers() -> dict[str, Mover]:
    """Return the movers of other libraries that are installed here."""
    found: dict[str, Mover] = {}
    for name, module, make in (
        ("accelerate", "accelerate.utils", lambda m: m.send_to_device),
        ("lightning", "lightning_fabric.utilities", lambda m: m.move_data_to_device),
        ("ignite", "ignite.utils", lambda m: m.convert_tensor),
        ("optree", "optree", lambda m: lambda x, d: m.tree_map(_leaf(d), x, none_is_leaf=True)),
    ):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            print(f"without {name}, which is not installed")
        else:
            found[name] = make(importlib.import_module(module))
    return found


def _leaf(device: torch.device) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf


def handles(mover: Mover, x: Any) -> bool:
    """Return whether a peer moves the structure at all, and all of it."""
    try:
        moved = mover(copy.deepcopy(x), META)
    except Exception:  # a peer may fail in any way: then it has no figure
        return False
    tensors = devicekit._tree.walk(moved)
    return all(leaf.device == META for _, leaf in tensors if isinstance(leaf, torch.Tensor))


def table(device: torch.device, bar: str, rounds: int) -> None:
    """Print one row for each contestant: the ratio to HAND in each workload."""
    rows: dict[str, dict[str, float]] = {}
    for name, workload in WORKLOADS.items():
        x = workload.make()
        contestants = {
            "HAND": lambda x=x, w=workload: w.by_hand(x, device),
            "LIMIT": lambda x=x, w=workload: w.limit(x, device),
            "devicekit": lambda x=x: devicekit.move(x, device),
        }
        for peer, mover in peers_here.items():
            if handles(mover, x):
                contestants[peer] = lambda x=x, m=mover: m(x, device)
        if device == META:
            del contestants["LIMIT"]
        for contestant, ratio in ratios(measure(contestants, rounds=rounds), "HAND").items():
            rows.setdefault(contestant, {})[name] = ratio
    print(f"{'':12s}" + "".join(f"{name:>9s}" for name in WORKLOADS))
    for contestant, row in rows.items():
        cells = (f"{row[name]:9.2f}" if name in row else f"{'-':>9s}" for name in WORKLOADS)
        print(f"{contestant:12s}" + "".join(cells))
    for name, workload in WORKLOADS.items():
        limit = getattr(workload, bar)
        if limit is not None:
            ours = rows["devicekit"][name]
            print(f"  {name} ({workload.title}): {ours:.2f} {verdict(ours, limit)}")
    compare_with_peers(rows)


def compare_with_peers(rows: dict[str, dict[str, float]]) -> None:
    """Print the geometric mean of each peer over what it handles, as a multiple of ours."""
    ours = rows["devicekit"]
    for peer in peers_here:
        shared = [name for name in rows.get(peer, {}) if name != "W7d"]
        if not shared:
            continue
        mean = math.exp(sum(math.log(rows[peer][n] / ours[n]) for n in shared) / len(shared))
        slower = [name for name in shared if ours[name] >= rows[peer][name]]
        print(f"  {peer}: {mean:.1f} times ours{f'; faster in {slower}' if slower else ''}")


def other_bars(rounds: int) -> None:
    """Print the bars that are no workload."""
    batch = WORKLOADS["W2"].make()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    found = ratios(
        measure(
            {
                "device": lambda: devicekit.move(batch, CPU),
                "model": lambda: devicekit.move(model, batch),
            },
            rounds=rounds,
        ),
        "device",
    )["model"]
    print(f"  move(model, batch) to move(batch, device): {found:.2f} {verdict(found, 1.5)}")
    for spec in ("cpu", CPU):
        times = measure(
            {
                "torch": lambda spec=spec: torch.device(spec),
                "devicekit": lambda spec=spec: devicekit.device(spec),
            },
            rounds=rounds,
        )
        found = ratios(times, "torch")["devicekit"]
        print(f"  device({spec!r}) to torch.device: {found:.2f} {verdict(found, 2)}")
    for width in (8, 1000):
        x = {i: torch.ones(1) for i in range(width)}
        devicekit.move(x, CPU)
        gc.collect()
        tracemalloc.start()
        devicekit.move(x, CPU)
        print(f"  a no-op of {width} tensors allocates {tracemalloc.get_traced_memory()[1]} bytes")
        tracemalloc.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=61)
    rounds = parser.parse_args().rounds
    peers_here = peers()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}; ratios to HAND\n\nno-op")
    table(CPU, "bar_no_op", rounds)
    print("\ncpu to meta: copies that cost nothing, the worst case for overhead")
    table(META, "bar_moving", rounds)
    print("\nothers")
    other_bars(rounds)
