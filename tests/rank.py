"""What one process of several does, started by a launcher or as if by one; see test_processes.py.

On the machine that `DEVICEKIT_TEST_MACHINE` names. It trains in step with the others, loads what
the first of them has saved, and writes what it saw to `rank<N>.json` in the folder it is given.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import machines

if __name__ == "__main__":  # pytest reads this file too, for doctests
    machines.install()

import torch
from torch import distributed, nn

import devicekit


def main(folder: Path) -> None:
    device = devicekit.auto()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = devicekit.move(nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = devicekit.move(model, {"x": torch.full((3, 4), rank + 1.0), "name": ["a", "b", "c"]})
    model(batch["x"]).square().sum().backward()
    average_gradients(model)
    optimizer.step()

    checkpoint = folder / "run.pt"
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    distributed.barrier()
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    loaded = devicekit.move(nn.Linear(4, 2))
    loaded.load_state_dict(state["model"])
    resumed = torch.optim.Adam(loaded.parameters(), lr=0.1)
    resumed.load_state_dict(state["optimizer"])
    seen: dict[str, Any] = {
        "auto": str(device),
        "model": str(devicekit.device_of(model)),
        "batch": str(batch["x"].device),
        "loaded": str(devicekit.inspect([loaded, resumed]).device),
        "equal": torch.equal(loaded.weight, model.weight),
        "weights": model.weight.detach().cpu().tolist(),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def average_gradients(model: nn.Module) -> None:
    """Do what DDP does, by way of the CPU: the fake devices have no collectives."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        total = parameter.grad.cpu()
        distributed.all_reduce(total)
        parameter.grad.copy_(total / distributed.get_world_size())


if __name__ == "__main__":
    os.environ.setdefault("DEVICEKIT_TEST_MACHINE", "cpu")
    main(Path(sys.argv[1]))
