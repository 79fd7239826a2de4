"""Save a checkpoint on one device, load it on whatever device is here, and go on training.

Shows why the device is checked first: `torch.load` puts tensors back where they were saved unless
`map_location` says otherwise, and fails where that device does not exist. With a device from
`device()` or `auto()`, model and optimizer arrive on it together.

Run it:

    python examples/03_checkpoint_anywhere.py
    python examples/03_checkpoint_anywhere.py --device cpu --checkpoint run.pt
    python examples/03_checkpoint_anywhere.py --checkpoint run.pt    # goes on, on auto()
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import devicekit

STEPS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, save, load anywhere, and go on training.")
    parser.add_argument("--device", default="auto", help="where to go on: auto, cpu, cuda:1, ...")
    parser.add_argument("--checkpoint", type=Path, help="where to save; it is read if it exists")
    args = parser.parse_args()
    try:
        device = devicekit.device(args.device)
    except devicekit.DeviceError as error:
        parser.error(str(error))

    with tempfile.TemporaryDirectory() as folder:
        path = args.checkpoint or Path(folder) / "run.pt"
        if not path.exists():
            start(path, devicekit.auto())
        go_on(path, device)


def start(path: Path, device: torch.device) -> None:
    """Train from scratch and save."""
    model = devicekit.move(network(), device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = train(model, optimizer)
    save(path, model, optimizer, steps=STEPS)
    print(f"trained {STEPS} steps on {device}: loss {loss:.4f}, saved")


def go_on(path: Path, device: torch.device) -> None:
    """Load what was saved, from any device onto this one, train on and save again."""
    checkpoint = torch.load(path, map_location=device, weights_only=True)

    model = devicekit.move(network(), device)
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(checkpoint["optimizer"])
    steps = checkpoint["steps"] + STEPS
    print(f"loaded on {devicekit.device_of(model)} after {checkpoint['steps']} steps")

    loss = train(model, optimizer)
    save(path, model, optimizer, steps=steps)
    print(f"trained {STEPS} more steps on {device}, {steps} in all: loss {loss:.4f}, saved")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Fit a sine for some steps, and return the last loss."""
    x, y = devicekit.move(model, sine())
    loss = torch.zeros(())
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def sine() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-3, 3, 128).unsqueeze(1)
    return x, x.sin()


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int) -> None:
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}, path
    )


if __name__ == "__main__":
    main()
