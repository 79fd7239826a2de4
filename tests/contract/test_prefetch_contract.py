"""`prefetch` on streams: right numbers however late the copies are, and nothing left behind."""

from __future__ import annotations

import gc
from collections import namedtuple
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import devicekit

if TYPE_CHECKING:
    from fake_accelerator.driver import Driver

Pair = namedtuple("Pair", "x y")

pytestmark = pytest.mark.machine("cuda")


@pytest.fixture
def late_copies(driver: Driver) -> Driver:
    driver.async_copies()
    return driver


def pinned(number: int = 6, size: int = 1000) -> Iterator[dict[str, Any]]:
    for i in range(number):
        yield {"x": torch.full((size,), float(i)).pin_memory(), "index": i}


def consume(loader: Iterable[dict[str, Any]]) -> list[float]:
    return [float((batch["x"] * 2).sum()) for batch in loader]


def look_at(loader: Iterable[dict[str, Any]], seen: list[int]) -> None:
    """Note the number of each batch, until the loader ends or fails."""
    for batch in loader:
        number = batch["index"]
        seen.append(number)


EXPECTED = [2000.0 * i for i in range(6)]


@pytest.mark.parametrize("depth", [1, 2, 5, 50])
def test_late_copies_are_waited_for(depth: int, dev: torch.device, late_copies: Driver) -> None:
    sums = consume(devicekit.prefetch(pinned(), dev, depth=depth))

    assert sums == EXPECTED
    assert late_copies.counters()["races"] == 0, late_copies.last_race()


def test_a_prefetcher_without_the_wait_would_be_caught(
    dev: torch.device, late_copies: Driver
) -> None:
    stream = torch.Stream(dev)
    with stream:
        early = [devicekit.move(batch, dev) for batch in pinned()]

    assert consume(early) != EXPECTED


def test_batches_are_copied_ahead_of_use(dev: torch.device, driver: Driver) -> None:
    with driver.counting() as counts:
        next(iter(devicekit.prefetch(pinned(), dev, depth=2)))

    assert counts["h2d"] == 3  # the one in use and two ahead


def test_batches_of_a_pinning_loader_with_a_worker(dev: torch.device, late_copies: Driver) -> None:
    data = TensorDataset(torch.arange(32.0).reshape(16, 2), torch.arange(16))
    loader = DataLoader(data, 4, pin_memory=True, num_workers=1)

    moved = [x.sum().item() for x, _ in devicekit.prefetch(loader, dev)]

    assert sum(moved) == sum(range(32))
    assert late_copies.counters()["races"] == 0, late_copies.last_race()


def test_any_batch_that_move_knows(dev: torch.device, late_copies: Driver) -> None:
    x = torch.ones(4).pin_memory()
    packed = nn.utils.rnn.pack_sequence([x, x])

    (moved,) = devicekit.prefetch([Pair(x, [x, {"deep": x}, packed])], dev)

    assert type(moved) is Pair
    assert moved.x is moved.y[0]
    assert moved.y[1]["deep"].sum().item() == 4
    assert moved.y[2].data.sum().item() == 8


def test_training_gives_the_numbers_of_the_plain_loop(
    dev: torch.device, late_copies: Driver
) -> None:
    def train(prefetched: bool) -> list[float]:
        torch.manual_seed(0)
        model = devicekit.move(nn.Linear(1000, 1), dev)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        losses = []
        for batch in devicekit.prefetch(pinned(), model) if prefetched else pinned():
            loss = model(devicekit.move(model, batch)["x"]).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train(prefetched=True) == train(prefetched=False)
    assert late_copies.counters()["races"] == 0, late_copies.last_race()


def test_memory_is_reused_only_when_the_consumer_is_done(
    dev: torch.device, late_copies: Driver
) -> None:
    total = torch.zeros(1000, device=dev)
    for batch in devicekit.prefetch(pinned(20), dev, depth=1):
        total += batch["x"]
        del batch

    assert total[0].item() == sum(range(20))
    assert late_copies.counters()["races"] == 0, late_copies.last_race()


def test_an_early_exit_leaves_nothing_behind(dev: torch.device, driver: Driver) -> None:
    used = driver.used(dev.index)
    for batch in devicekit.prefetch(pinned(), dev):
        del batch
        break

    gc.collect()
    torch.accelerator.synchronize(dev)
    assert driver.used(dev.index) == used


def test_an_exception_of_the_loader_comes_in_its_turn(dev: torch.device, driver: Driver) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from pinned(2)
        msg = "the disk is full"
        raise OSError(msg)

    seen: list[int] = []
    with pytest.raises(OSError, match="the disk is full"):
        look_at(devicekit.prefetch(broken(), dev, depth=5), seen)

    assert seen == [0, 1]


def test_a_batch_that_cannot_be_moved_is_reported_in_its_turn(
    dev: torch.device, driver: Driver
) -> None:
    driver.fail_after(3, "allocation")
    seen: list[int] = []

    with pytest.raises(devicekit.MoveError, match=r"batch\['x'\] could not be moved"):
        look_at(devicekit.prefetch(pinned(), dev), seen)

    assert seen == [0, 1]


def test_one_stream_serves_all_passes(dev: torch.device, driver: Driver) -> None:
    loader = devicekit.prefetch(list(pinned()), dev)

    first, second = consume(loader), consume(loader)

    assert first == second == EXPECTED
    assert len(loader._streams) == 1


def test_sparse_batches_wait_where_torch_cannot_record_their_stream(
    dev: torch.device, late_copies: Driver
) -> None:
    eye = torch.eye(3).to_sparse()

    moved = [batch.to_dense().sum().item() for batch in devicekit.prefetch([eye] * 4, dev)]

    assert moved == [3.0] * 4
    assert late_copies.counters()["races"] == 0, late_copies.last_race()
