"""Copies in flight: what a fake machine shows of streams, pinned memory and memory given back.

With `async_copies`, a copy that nothing waits for leaves NaN behind, and uses of one block by two
streams in no order are counted. So a test of devicekit can prove that it waits where it must.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_accelerator.driver import Driver


@pytest.fixture
def late_copies(driver: Driver) -> Driver:
    """The driver, with non-blocking copies that happen as late as they may."""
    driver.async_copies()
    return driver


def is_garbage(x: torch.Tensor) -> bool:
    return bool(x.cpu().isnan().all())


def test_pinned_memory(dev: torch.device) -> None:
    x = torch.randn(3)
    pinned = x.pin_memory()

    assert not x.is_pinned()
    assert pinned.is_pinned()
    assert torch.equal(pinned, x)
    assert torch.equal(pinned.to(dev, non_blocking=True).cpu(), x)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_pins_its_batches(workers: int, dev: torch.device) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 2, device="cpu"))
    loader = torch.utils.data.DataLoader(data, 4, pin_memory=True, num_workers=workers)

    for (batch,) in loader:
        assert batch.is_pinned()
        assert batch.to(dev, non_blocking=True).device == dev


def test_a_copy_down_that_nobody_waits_for_is_garbage(
    dev: torch.device, late_copies: Driver
) -> None:
    x = torch.ones(4, device=dev)

    y = x.to("cpu", non_blocking=True)

    assert is_garbage(y)
    torch.accelerator.synchronize(dev)
    assert y.tolist() == [1] * 4
    assert late_copies.counters()["races"] == 0


def test_a_copy_down_to_pageable_memory_blocks(dev: torch.device, late_copies: Driver) -> None:
    y = torch.empty(4)

    y.copy_(torch.ones(4, device=dev), non_blocking=True)

    assert y.tolist() == [1] * 4
    assert late_copies.pending(dev.index) == 0


def test_a_copy_up_reads_pinned_memory_late(dev: torch.device, late_copies: Driver) -> None:
    early, late, pageable = torch.ones(4).pin_memory(), torch.ones(4).pin_memory(), torch.ones(4)

    copies = [x.to(dev, non_blocking=True) for x in (early, late, pageable)]
    early.fill_(7)
    pageable.fill_(7)
    torch.accelerator.synchronize(dev)
    late.fill_(7)

    assert [x[0].item() for x in copies] == [7, 1, 1]
    assert late_copies.counters()["nonblocking"] == 3


def test_work_on_the_same_stream_comes_after_the_copy(
    dev: torch.device, late_copies: Driver
) -> None:
    x = torch.ones(4).pin_memory().to(dev, non_blocking=True)

    assert (x + 1).tolist() == [2] * 4
    assert late_copies.counters()["races"] == 0


@pytest.fixture
def side(dev: torch.device) -> torch.Stream:
    return torch.Stream(dev)


def test_work_on_another_stream_does_not(
    dev: torch.device, side: torch.Stream, late_copies: Driver
) -> None:
    with side:
        x = torch.ones(4).pin_memory().to(dev, non_blocking=True)

    assert is_garbage(x + 1)
    assert late_copies.counters()["races"] > 0
    assert "without waiting" in late_copies.last_race()


def wait_for_stream(side: torch.Stream) -> None:
    torch.accelerator.current_stream().wait_stream(side)


def wait_for_event(side: torch.Stream) -> None:
    torch.accelerator.current_stream().wait_event(side.record_event())


def let_the_host_wait(side: torch.Stream) -> None:
    side.synchronize()


def let_the_host_wait_for_an_event(side: torch.Stream) -> None:
    event = side.record_event()
    assert not event.query()
    event.synchronize()
    assert event.query()


@pytest.mark.parametrize(
    "wait",
    [wait_for_stream, wait_for_event, let_the_host_wait, let_the_host_wait_for_an_event],
    ids=lambda wait: wait.__name__,
)
def test_another_stream_can_wait(
    wait: Callable[[torch.Stream], None],
    dev: torch.device,
    side: torch.Stream,
    late_copies: Driver,
) -> None:
    with side:
        x = torch.ones(4).pin_memory().to(dev, non_blocking=True)

    wait(side)

    assert (x + 1).tolist() == [2] * 4
    assert late_copies.counters()["races"] == 0


def test_an_event_covers_what_came_before_it(
    dev: torch.device, side: torch.Stream, late_copies: Driver
) -> None:
    with side:
        x = torch.ones(4).pin_memory().to(dev, non_blocking=True)
        event = side.record_event()
        y = torch.ones(4).pin_memory().to(dev, non_blocking=True)

    torch.accelerator.current_stream().wait_event(event)

    assert (x + 1).tolist() == [2] * 4
    assert late_copies.counters()["races"] == 0
    assert is_garbage(y + 1)
    assert late_copies.counters()["races"] > 0


def test_a_stream_that_waits_is_not_a_host_that_waits(
    dev: torch.device, side: torch.Stream, late_copies: Driver
) -> None:
    x = torch.ones(4, device=dev)
    wait_for_stream(side)
    with side:
        side.wait_stream(torch.accelerator.current_stream(dev))
        y = x.to("cpu", non_blocking=True)

    wait_for_stream(side)

    assert is_garbage(y)
    torch.accelerator.synchronize(dev)
    assert y.tolist() == [1] * 4
    assert late_copies.pending(dev.index) == 0


def record(x: torch.Tensor, _side: torch.Stream) -> None:
    x.record_stream(torch.accelerator.current_stream())


def order_the_reuse(_x: torch.Tensor, side: torch.Stream) -> None:
    side.wait_stream(torch.accelerator.current_stream())


@pytest.mark.parametrize(
    ("keep", "races"),
    [(None, 1), (record, 0), (order_the_reuse, 0)],
    ids=["carelessly", "recorded", "ordered"],
)
def test_memory_of_one_stream_used_on_another_is_given_back(
    keep: Callable[[torch.Tensor, torch.Stream], None] | None,
    races: int,
    dev: torch.device,
    side: torch.Stream,
    late_copies: Driver,
) -> None:
    pinned = torch.ones(4).pin_memory()
    with side:
        x = pinned.to(dev, non_blocking=True)
    wait_for_stream(side)
    y = x + 1
    if keep:
        keep(x, side)
    del x

    with side:  # takes the memory of the first batch
        pinned.to(dev, non_blocking=True)

    assert late_copies.counters()["races"] == races
    assert y.tolist() == [2] * 4


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_given_back_before_it_is_read(
    recorded: bool, dev: torch.device, side: torch.Stream, late_copies: Driver
) -> None:
    x = torch.ones(4, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x.to("cpu", non_blocking=True)
    if recorded:
        x.record_stream(side)
    del x
    torch.empty(4, device=dev)  # may take the same memory

    torch.accelerator.synchronize(dev)

    assert is_garbage(y) is not recorded
    assert late_copies.counters()["races"] == (0 if recorded else 1)


def test_a_training_step_has_no_races(
    dev: torch.device, dev1: torch.device, late_copies: Driver
) -> None:
    first, second = nn.Linear(4, 4).to(dev), nn.Linear(4, 2).to(dev1)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])

    for _ in range(2):
        x = torch.randn(2, 4).pin_memory().to(dev, non_blocking=True)
        second(first(x).to(dev1, non_blocking=True)).sum().backward()
        optimizer.step()

    assert late_copies.last_race() == ""
    assert late_copies.counters()["races"] == 0


@pytest.mark.machine("mps")
def test_mps_copies_from_and_to_any_memory_late(dev: torch.device, late_copies: Driver) -> None:
    source, target = torch.ones(4), torch.empty(4)

    there = source.to(dev, non_blocking=True)
    source.fill_(7)
    target.copy_(there, non_blocking=True)

    assert is_garbage(target)
    torch.accelerator.synchronize()
    assert target.tolist() == [7] * 4
    assert late_copies.counters()["races"] == 0
