"""Train on every device of a machine, with one process for each, started by torchrun.

Shows what devicekit does in such a program, and what it leaves to torch.distributed: `auto()` gives
each process the device of its rank, `move(model, batch)` sends its share of the data there, and a
checkpoint that one process has saved is loaded by each onto its own device.

Run it:

    torchrun --standalone --nproc-per-node=gpu examples/07_several_processes.py
    torchrun --standalone --nproc-per-node=2 examples/07_several_processes.py    # without GPUs

(`python examples/07_several_processes.py` trains in one process.)
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import devicekit

EPOCHS = 8


class Sine(Dataset[dict[str, Tensor]]):
    """512 points of a sine."""

    def __init__(self) -> None:
        self.x = torch.linspace(-3, 3, 512).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.x[index].sin()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train in as many processes as were started.")
    parser.add_argument("--backend", help="of torch.distributed; torch's own choice if not given")
    args = parser.parse_args()

    device = devicekit.auto()  # cuda:1 for LOCAL_RANK=1; more ranks than devices are an error
    start(device, args.backend)
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    print(f"process {rank} of {processes} trains on {device}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        train(device, Path(one_for_all(folder)) / "run.pt")
    distributed.destroy_process_group()


def start(device: torch.device, backend: str | None) -> None:
    """Meet the other processes; without a launcher there are none."""
    backend = backend or distributed.get_default_backend_for_device(device)
    if distributed.is_torchelastic_launched():
        distributed.init_process_group(backend)
    else:
        distributed.init_process_group(backend, "tcp://localhost:0", rank=0, world_size=1)


def train(device: torch.device, checkpoint: Path) -> None:
    rank = distributed.get_rank()
    torch.manual_seed(rank)  # every process starts with other weights: DDP spreads those of rank 0
    model = DistributedDataParallel(devicekit.move(network(), device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    points = Sine()
    sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(points)
    loader = DataLoader(points, batch_size=32, sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses: list[Tensor] = []
        for batch in loader:
            batch = devicekit.move(model, batch)
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if rank == 0:
            mean = torch.stack(losses).mean().item()
            print(f"epoch {epoch + 1} of {EPOCHS}: loss {mean:.4f}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), checkpoint)
    distributed.barrier()  # until it is there
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    loaded = devicekit.move(network(), device)
    loaded.load_state_dict(state)
    pairs = zip(loaded.parameters(), model.parameters(), strict=True)
    same = all(torch.equal(*pair) for pair in pairs)
    print(f"process {rank} loaded it on {devicekit.device_of(loaded)}: {same}", flush=True)
    distributed.barrier()  # until all have read it


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def one_for_all(value: Any) -> Any:
    """Return what rank 0 has."""
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]


if __name__ == "__main__":
    main()
