"""Give a model of a class you cannot edit inputs from anywhere.

Shows that a wrapped model stays the same object, that methods beside `forward` take inputs from
anywhere too, that inputs follow the model when it moves, and that `unwrap` leaves no trace.

Run it:

    python examples/06_wrap_a_model.py
    python examples/06_wrap_a_model.py --device cuda
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import devicekit

# ---- somebody else's library ---------------------------------------------------------------------


class Reader(nn.Module):
    """Reads words as numbers: `forward` gives scores, `embed` gives a vector for each text."""

    def __init__(self, words: int = 100, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.scores = nn.Linear(width, 2)

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(ids) * mask.unsqueeze(-1)
        return vectors.sum(dim=1) / mask.sum(dim=1, keepdim=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.embed(ids, mask))
        return scores


def tokenize(texts: list[str]) -> dict[str, Tensor]:
    """Return a batch on the CPU, as tokenizers do."""
    rows = [[sum(map(ord, word)) % 100 for word in text.split()] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (longest - len(row)) for row in rows])
    return {"ids": ids, "mask": mask}


# ---- your program --------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Wrap a model of a class you cannot edit.")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:1, meta, ...")
    args = parser.parse_args()
    try:
        device = devicekit.device(args.device)
    except devicekit.DeviceError as error:
        parser.error(str(error))

    batch = tokenize(["a cat sat", "the dog"])
    model = devicekit.move(Reader(), device)
    wrapped = devicekit.wrap(model, methods=("forward", "embed"))

    print(f"the same object: {wrapped is model}")
    print(f"inputs on {devicekit.device_of(batch)}, scores on {model(**batch).device}")
    print(f"and vectors on {model.embed(**batch).device}")
    if device.type == "meta":  # without values, which move() refuses to make up
        model.to_empty(device="cpu")
    devicekit.move(model, "cpu")
    print(f"moved afterwards: scores on {model(**batch).device}")
    devicekit.wrap(model, outputs="meta")
    print(f"with outputs='meta': scores on {model(**batch).device}")
    print(f"unwrapped: {devicekit.unwrap(model)._forward_pre_hooks or 'nothing is left'}")


if __name__ == "__main__":
    main()
