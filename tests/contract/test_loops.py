"""Loops as programs write them, with tensors large enough to be late on a real accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import machines
import pytest
import torch
from torch import Tensor, nn

import devicekit

pytestmark = pytest.mark.machine("cuda", "real")

STEPS = 20
# 256 MB take some 10 ms to copy: a read that does not wait finds what was there before.
NUMBERS = 1 << 12 if machines.FAKE else 1 << 26


def pinned(numbers: int = NUMBERS) -> Tensor:
    return torch.zeros(numbers).pin_memory()


def ends(x: Tensor) -> list[float]:
    """Return the first and the last number, which are copied at different times."""
    return x[:: len(x) - 1].tolist()


@pytest.mark.parametrize("non_blocking", [None, True, False])
def test_what_arrives_on_the_device_is_what_was_sent(
    non_blocking: bool | None, dev: torch.device
) -> None:
    buffers = [pinned() for _ in range(2)]
    sums = []
    for step in range(STEPS):
        source = buffers[step % 2]
        if non_blocking is not False:  # the copy before last may still read it
            torch.accelerator.synchronize(dev)
        source.fill_(step)
        there = devicekit.move({"x": source}, dev, non_blocking=non_blocking)["x"]
        sums.append(ends(there))

    assert sums == [[step, step] for step in range(STEPS)]


@pytest.mark.parametrize("non_blocking", [None, True, False])
def test_what_arrives_on_the_cpu_can_be_read_at_once(
    non_blocking: bool | None, dev: torch.device
) -> None:
    there = torch.zeros(NUMBERS, device=dev)
    for step in range(STEPS):
        there.fill_(step)
        batch = {"a": there, "b": there + 0.5}

        back = devicekit.move(batch, "cpu", non_blocking=non_blocking)

        assert [ends(back["a"]), ends(back["b"])] == [[step] * 2, [step + 0.5] * 2]


def test_a_buffer_filled_again_right_away_needs_a_blocking_copy(dev: torch.device) -> None:
    source = pinned()
    for step in range(STEPS):
        source.fill_(step)
        there = devicekit.move(source, dev, non_blocking=False)
        source.fill_(-1)

        assert ends(there) == [step, step]


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetched_batches_are_right_under_work_that_overlaps(
    depth: int, dev: torch.device
) -> None:
    def batches() -> Iterator[dict[str, Any]]:
        for step in range(STEPS):
            yield {"x": torch.full((NUMBERS,), float(step)).pin_memory(), "step": step}

    work = torch.eye(8 if machines.FAKE else 4096, device=dev)
    seen = []
    for batch in devicekit.prefetch(batches(), dev, depth=depth):
        for _ in range(3):  # keeps the device busy while the next copies run
            work = work @ work
        found = batch["x"][:: NUMBERS - 1] * work[0, 0]
        seen.append((batch["step"], found))
        del batch

    assert [(step, found.tolist()) for step, found in seen] == [
        (step, [float(step)] * 2) for step in range(STEPS)
    ]


def to_device(model: nn.Module, dev: torch.device) -> Callable[[Any], Any]:
    return lambda batch: devicekit.move(batch, dev)


def to_model(model: nn.Module, dev: torch.device) -> Callable[[Any], Any]:
    return lambda batch: devicekit.move(model, batch)


@pytest.mark.parametrize("way", [to_device, to_model])
def test_a_compiled_step_takes_a_batch_from_the_cpu(
    way: Callable[[nn.Module, torch.device], Callable[[Any], Any]], dev: torch.device
) -> None:
    model = devicekit.move(nn.Linear(4, 2), dev)
    move = way(model, dev)

    @torch.compile(fullgraph=True, backend="eager")
    def step(batch: dict[str, Any]) -> Tensor:
        there = move(batch)
        return model(there["x"]).sum() + there["more"][0].sum()

    batch = {"x": torch.ones(3, 4), "more": [torch.ones(2)], "name": "a"}
    for _ in range(3):
        loss = step(batch)
        loss.backward()

    assert loss.device == dev
    assert batch["x"].device.type == "cpu"
    torch.testing.assert_close(loss, model(devicekit.move(batch["x"], dev)).sum() + 2)
