"""What `move` returns can be read, however late the machine makes its copies."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from devicekit import move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fake_accelerator.driver import Driver

CPU = torch.device("cpu")
# Where a copy may still run when `move` returns. So does XPU, whose fake has no `current_stream`.
streamed = pytest.mark.machine("cuda")


@pytest.fixture
def late_copies(driver: Driver) -> Driver:
    """The driver, with non-blocking copies that happen as late as they may."""
    driver.async_copies()
    return driver


@contextlib.contextmanager
def no_races(driver: Driver) -> Iterator[None]:
    with driver.counting() as counted:
        yield
    assert counted["races"] == 0, driver.last_race()


# Towards the device


def test_pinned_batches_are_copied_without_waiting_where_that_is_safe(
    dev: torch.device, late_copies: Driver
) -> None:
    batch = {"x": torch.ones(4).pin_memory(), "y": [torch.arange(3.0).pin_memory()]}

    with no_races(late_copies), late_copies.counting() as counted:
        moved = move(batch, dev)
        waiting = late_copies.pending(dev.index)
        doubled = moved["x"] * 2

    in_flight = dev.type in ("cuda", "xpu")
    assert (waiting > 0) is in_flight
    assert (counted["nonblocking"] == 2) is in_flight
    assert counted["sync"] == 0
    assert doubled.tolist() == [2] * 4
    assert moved["y"][0].tolist() == [0, 1, 2]


def test_a_pageable_batch_may_be_filled_again(dev: torch.device, late_copies: Driver) -> None:
    buffer = torch.ones(4)

    moved = move([buffer], dev)[0]
    buffer.fill_(7)

    assert moved.tolist() == [1] * 4


@pytest.mark.parametrize("non_blocking", [None, True, False])
def test_blocking_copies_are_asked_for_as_told(
    non_blocking: bool | None, dev: torch.device, late_copies: Driver
) -> None:
    buffer = torch.ones(4).pin_memory()

    with late_copies.counting() as counted:
        moved = move([buffer], dev, non_blocking=non_blocking)[0]
    if non_blocking is False:
        buffer.fill_(7)  # which is safe then

    may_wait = dev.type in ("cuda", "xpu") and non_blocking is not False
    assert counted["nonblocking"] == (1 if may_wait else 0)
    assert moved.tolist() == [1] * 4


def test_one_tensor_is_sent_like_a_batch(dev: torch.device, late_copies: Driver) -> None:
    moved = move(torch.ones(4).pin_memory(), dev, non_blocking=False)

    assert late_copies.counters()["nonblocking"] == 0
    assert moved.tolist() == [1] * 4


@pytest.mark.machine("mps")
@pytest.mark.parametrize("non_blocking", [None, True, False])
def test_mps_reads_its_source_before_the_call_returns(
    non_blocking: bool | None, dev: torch.device, late_copies: Driver
) -> None:
    buffer = torch.ones(4)

    moved = move([buffer], dev, non_blocking=non_blocking)[0]
    buffer.fill_(7)
    back = move([moved], CPU, non_blocking=non_blocking)[0]

    assert back.tolist() == [1] * 4
    assert late_copies.counters()["nonblocking"] == 0


# Towards the CPU


def naively(batch: list[Tensor]) -> list[Tensor]:
    """Return what most projects write."""
    return [tensor.to("cpu", non_blocking=True) for tensor in batch]


@streamed
def test_the_naive_way_reads_garbage(dev: torch.device, late_copies: Driver) -> None:
    """It shows that the tests below would catch a `move` that does not wait."""
    batch = [torch.full((4,), float(n), device=dev) for n in range(3)]

    host = naively(batch)

    assert all(tensor.isnan().all() for tensor in host)
    torch.accelerator.synchronize(dev)
    assert [tensor[0].item() for tensor in host] == [0, 1, 2]


@pytest.mark.parametrize("non_blocking", [None, True, False])
def test_what_comes_down_can_be_read_at_once(
    non_blocking: bool | None, dev: torch.device, dev1: torch.device, late_copies: Driver
) -> None:
    batch = {
        "first": [torch.full((4,), float(n), device=dev) for n in range(3)],
        "second": (torch.full((4,), 7.0, device=dev1), torch.ones(2)),
    }

    with no_races(late_copies):
        host = move(batch, CPU, non_blocking=non_blocking)

        assert [tensor[0].item() for tensor in host["first"]] == [0, 1, 2]
        assert host["second"][0].tolist() == [7] * 4


@streamed
def test_copies_down_are_issued_together_and_waited_for_once(
    dev: torch.device, dev1: torch.device, late_copies: Driver
) -> None:
    batch = [torch.full((4,), float(n), device=(dev, dev1)[n % 2]) for n in range(8)]

    with late_copies.counting() as counted:
        host = move(batch, CPU, non_blocking=True)

    assert counted["sync"] == 2  # once for each device
    assert counted["nonblocking"] == counted["d2h"] == 8
    assert [tensor[0].item() for tensor in host] == list(range(8))
    with late_copies.counting() as counted:
        move(batch, CPU)
    assert counted["nonblocking"] == 0


@streamed
def test_only_the_streams_that_copied_are_waited_for(
    dev: torch.device, late_copies: Driver
) -> None:
    side = torch.Stream(dev)
    x = torch.ones(4, device=dev)
    side.wait_stream(torch.accelerator.current_stream(dev))
    with side:
        host = move([x], CPU, non_blocking=True)[0]

    assert host.tolist() == [1] * 4
    assert late_copies.counters()["races"] == 0


def test_a_parameter_comes_down_whole(dev: torch.device, late_copies: Driver) -> None:
    parameters = [nn.Parameter(torch.full((4,), 3.0, device=dev)) for _ in range(2)]

    host = move(parameters, CPU, non_blocking=True)

    assert [tensor.tolist() for tensor in host] == [[3.0] * 4] * 2


def test_modules_come_down_whole(dev: torch.device, late_copies: Driver) -> None:
    model = move(nn.Linear(2, 2), dev, non_blocking=True)
    want = model.weight.tolist()

    move([model], CPU, non_blocking=True)

    assert model.weight.tolist() == want
    assert late_copies.counters()["races"] == 0


# Between devices


@pytest.mark.parametrize("non_blocking", [None, True, False])
def test_from_device_to_device(
    non_blocking: bool | None, dev: torch.device, dev1: torch.device, late_copies: Driver
) -> None:
    x = torch.arange(4.0, device=dev)

    moved = move({"x": x}, dev1, non_blocking=non_blocking)["x"]
    del x

    assert (moved + 1).tolist() == [1, 2, 3, 4]
    assert late_copies.counters()["races"] == 0


# Loaders


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
def test_batches_of_a_loader(
    workers: int, pin: bool, dev: torch.device, late_copies: Driver
) -> None:
    data = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
    loader = DataLoader(data, 2, pin_memory=pin, num_workers=workers)
    model = move(nn.Linear(1, 1), dev)
    with torch.no_grad():
        model.weight.fill_(2)
        model.bias.fill_(1)

    seen: list[Any] = []
    with no_races(late_copies), torch.no_grad():
        for batch in loader:
            x, index = move(model, batch)
            seen += zip(index.tolist(), model(x).flatten().tolist(), strict=True)

    assert seen == [(n, 2.0 * n + 1) for n in range(8)]


def test_training_from_pinned_batches_has_no_races(dev: torch.device, late_copies: Driver) -> None:
    model = move(nn.Linear(4, 2), dev)
    optimizer = torch.optim.Adam(model.parameters())

    with no_races(late_copies):
        for _ in range(3):
            batch = move(model, {"x": torch.randn(2, 4).pin_memory()})
            model(batch["x"]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        losses = move([model.weight.sum()], CPU, non_blocking=True)

    assert not losses[0].isnan()
