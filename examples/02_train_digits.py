"""Train a small network on real handwritten digits, on the best device that is here.

Shows the three calls that make a training script run anywhere: `auto()` for the device,
`move(model, device)` once, and `move(model, batch)` for every batch, which sends a batch of any
structure to where the model is. The data are the 1797 digits that come with scikit-learn.

Run it:

    pip install ".[examples]"
    python examples/02_train_digits.py
    python examples/02_train_digits.py --device cuda:1
    DEVICEKIT_DEVICE=cpu python examples/02_train_digits.py
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split

import devicekit

EPOCHS = 10
SEED = 0


class Target(TypedDict):
    digit: Tensor  # (batch,)


class Batch(TypedDict):
    image: Tensor  # (batch, 1, 8, 8)
    target: Target
    name: list[str]  # not a tensor: move() passes it through


class Digits(Dataset[Any]):
    """One dict for each digit; DataLoader makes a `Batch` of several."""

    def __init__(self, images: Any, digits: Any) -> None:
        self.images = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.digits = torch.as_tensor(digits)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Any]:
        target = {"digit": self.digits[index]}
        return {"image": self.images[index], "target": target, "name": f"digit {index}"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits.")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:1, mps, ...")
    args = parser.parse_args()

    logging.basicConfig(format="%(message)s")
    logging.getLogger("devicekit").setLevel(logging.INFO)  # auto() says what it chose, and why
    torch.manual_seed(SEED)
    try:
        device = devicekit.device(args.device)
    except devicekit.DeviceError as error:
        parser.error(str(error))
    train, test = load()

    model = devicekit.move(network(), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    print(f"training on {device}")
    for epoch in range(1, EPOCHS + 1):
        loss, accuracy = train_epoch(model, train, optimizer)
        print(f"epoch {epoch:2} of {EPOCHS}: loss {loss:.4f}, training accuracy {accuracy:.3f}")
    print(f"test accuracy: {evaluate(model, test):.3f}")


def load() -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    """Return three quarters of the digits to train on, and a quarter to test on."""
    digits = Digits(*load_digits(return_X_y=True))
    seed = torch.Generator().manual_seed(SEED)
    train, test = random_split(digits, [0.75, 0.25], generator=seed)
    print(f"{len(train)} digits to train on, {len(test)} to test on")
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=256)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 10),
    )


def train_epoch(
    model: nn.Module, loader: Iterable[Batch], optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """Return the mean loss and the accuracy over one epoch."""
    model.train()
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    for batch in loader:
        batch = devicekit.move(model, batch)  # nested dicts come out as they went in
        digit = batch["target"]["digit"]
        logits = model(batch["image"])
        loss = nn.functional.cross_entropy(logits, digit)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        hits.append(logits.argmax(1) == digit)
    return torch.stack(losses).mean().item(), torch.cat(hits).float().mean().item()


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[Batch]) -> float:
    """Return the accuracy."""
    model.eval()
    hits: list[Tensor] = []
    for batch in loader:
        batch = devicekit.move(model, batch)
        hits.append(model(batch["image"]).argmax(1) == batch["target"]["digit"])
    return torch.cat(hits).float().mean().item()


if __name__ == "__main__":
    main()
