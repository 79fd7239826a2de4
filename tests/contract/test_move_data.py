"""Data arrives with its numbers, in the containers it came in, and nothing is copied twice."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from anatomy import anatomy, contents, snapshot
from containers import CONTAINERS
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import devicekit
from devicekit import DeviceError, MoveError, device_of, move

if TYPE_CHECKING:
    from fake_accelerator.driver import Driver

CPU = torch.device("cpu")
every_container = pytest.mark.parametrize("kind", sorted(CONTAINERS))


def tensors(x: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in a structure, each once."""
    seen = set() if seen is None else seen
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield x
    for _, part in contents(x):
        yield from tensors(part, seen)


def batch_of(kind: str) -> Any:
    return CONTAINERS[kind](torch.arange(3.0), [torch.tensor([4, 5]), "text"])


def values(x: Any) -> list[list[float]]:
    return sorted(tensor.tolist() for tensor in tensors(x))


# There and back


@every_container
def test_a_batch_goes_up_across_and_down(kind: str, dev: torch.device, dev1: torch.device) -> None:
    batch = batch_of(kind)
    built, held = anatomy(batch), snapshot(batch)

    there = move(batch, dev)
    across = move(there, dev1)
    back = move(across, CPU)

    for moved, where in ((there, dev), (across, dev1), (back, CPU)):
        assert {tensor.device for tensor in tensors(moved)} == {where}
        assert anatomy(moved)[0] == built[0]
        assert values(moved) == [[0, 1, 2], [4, 5]]
    assert anatomy(back) == built
    assert snapshot(batch) == held


@every_container
def test_what_is_there_is_not_copied(kind: str, dev: torch.device, driver: Driver) -> None:
    there = move(batch_of(kind), dev)

    with driver.counting() as counted:
        again = move(there, dev)

    assert again is there
    assert not any(counted.values())


@every_container
def test_each_tensor_is_copied_once(kind: str, dev: torch.device, driver: Driver) -> None:
    x = torch.ones(3)
    batch = {"first": CONTAINERS[kind](x, x), "second": [x]}

    with driver.counting() as counted:
        moved = move(batch, dev)

    assert counted["h2d"] == counted["allocs"] == 1
    assert len(list(tensors(moved))) == 1


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.randn(4, 6)[:, ::2], id="strided"),
        pytest.param(torch.randn(3, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(torch.empty(0, 3), id="empty"),
        pytest.param(torch.tensor(2.0), id="scalar"),
        pytest.param(torch.ones(2, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(torch.tensor([True, False]), id="bool"),
        pytest.param(torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(nn.Parameter(torch.ones(2)), id="parameter"),
    ],
)
def test_kinds_of_tensors(x: Tensor, dev: torch.device) -> None:
    moved = move([x], dev)[0]

    assert moved.device == dev
    assert moved.dtype == x.dtype
    assert moved.layout == x.layout
    back = move(moved, CPU)
    assert torch.equal(*(t.detach().to_dense() if t.is_sparse else t for t in (back, x)))


def test_packed_sequences_keep_their_lengths_on_the_cpu(dev: torch.device) -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])

    moved = move({"x": packed}, dev)["x"]

    assert moved.data.device == dev
    assert moved.batch_sizes.device == CPU
    assert move(moved, dev) is moved


def test_a_part_that_is_there_already_is_not_copied(dev: torch.device, driver: Driver) -> None:
    ready = torch.ones(3, device=dev)
    labels = [ready, "text"]

    with driver.counting() as counted:
        moved = move({"x": torch.ones(3), "labels": labels}, dev)

    assert moved["labels"] is labels
    assert counted["h2d"] == 1
    assert counted["d2d"] == 0


def test_skipped_keys_stay(dev: torch.device, driver: Driver) -> None:
    batch = {"x": torch.ones(2), "sub": [{"index": torch.ones(2)}]}

    with driver.counting() as counted:
        moved = move(batch, dev, skip_keys="index")

    assert moved["sub"] is batch["sub"]
    assert counted["h2d"] == 1


class Sealed(Tensor):
    """A tensor whose `.to` takes a device and nothing else."""

    def to(self, device: torch.device) -> Sealed:  # type: ignore[override]
        return super().to(device).as_subclass(Sealed)


@pytest.mark.parametrize("non_blocking", [None, True, False])
def test_the_to_of_a_tensor_subclass_is_respected(
    non_blocking: bool | None, dev: torch.device
) -> None:
    x = torch.ones(2).as_subclass(Sealed)

    there = move([x], dev, non_blocking=non_blocking)[0]
    back = move([there], CPU, non_blocking=non_blocking)[0]

    assert type(there) is type(back) is Sealed
    assert there.device == dev
    assert back.tolist() == [1, 1]


class InPlace:
    """As many data classes: `.to` replaces the items of what it holds."""

    def __init__(self, x: Tensor) -> None:
        self.parts = {"x": [x]}

    def to(self, device: torch.device) -> None:
        self.parts["x"][0] = self.parts["x"][0].to(device)


def test_an_object_that_moves_in_place_leaves_the_batch_as_it_was(dev: torch.device) -> None:
    batch = [InPlace(torch.ones(2))]

    moved = move(batch, dev)

    assert type(moved[0]) is InPlace
    assert moved[0].parts["x"][0].device == dev
    assert batch[0].parts["x"][0].device == CPU


# Where to


def test_a_device_without_index_is_the_current_one(dev: torch.device, dev1: torch.device) -> None:
    x = torch.ones(1)

    assert move(x, dev.type).device == dev
    with torch.accelerator.device_index(dev1.index):
        assert move(x, dev.type).device == dev1
    there = move(x, dev)
    assert move(there, dev.type) is there


def test_a_number_is_a_device_of_the_accelerator(dev1: torch.device) -> None:
    assert move([torch.ones(1)], dev1.index)[0].device == dev1


def test_without_a_device_it_goes_to_auto(dev: torch.device) -> None:
    assert move([torch.ones(1)])[0].device == devicekit.auto()
    assert devicekit.auto().type == dev.type


def test_a_device_that_is_not_there_is_refused_even_for_nothing(dev: torch.device) -> None:
    for nothing in ([], "text", None):
        with pytest.raises(devicekit.DeviceUnavailableError, match="is not available"):
            move(nothing, f"{dev.type}:15")


def test_a_batch_follows_the_model(dev: torch.device, dev1: torch.device) -> None:
    model, batch = nn.Linear(2, 1), {"x": torch.ones(3, 2)}

    for where in (dev, dev1, CPU, dev):
        move(model, where)
        moved = move(model, batch)

        assert moved["x"].device == where
        assert model(moved["x"]).device == where
    assert move(model, moved) is moved


def test_device_of_finds_where_anything_is(dev: torch.device, dev1: torch.device) -> None:
    model = move(nn.Linear(2, 2), dev)
    optimizer = torch.optim.SGD(model.parameters())

    assert device_of(model) == device_of(optimizer) == dev
    assert device_of(nn.DataParallel(model)) == dev
    assert device_of(move(nn.BatchNorm1d(2, affine=False), dev1)) == dev1
    assert device_of(torch.ones(1, device=dev1)) == dev1
    for kind in CONTAINERS:
        assert device_of(move(batch_of(kind), dev1)) == dev1
    assert device_of([1, "text"], None) is None


# Gradients, files


def test_gradients_flow_through_a_move(dev: torch.device, dev1: torch.device) -> None:
    x = torch.ones(3, requires_grad=True)

    moved = move({"x": move([x], dev)[0] * 2}, dev1)["x"]
    moved.pow(2).sum().backward()

    assert moved.device == dev1
    assert x.grad is not None
    assert x.grad.device == CPU
    assert x.grad.tolist() == [8, 8, 8]


def test_a_checkpoint_goes_round(dev: torch.device, dev1: torch.device) -> None:
    model = move(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), dev)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2, device=dev)).sum().backward()
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(move({"model": model.state_dict(), "optim": optimizer.state_dict()}, CPU), buffer)
    buffer.seek(0)

    loaded = torch.load(buffer)  # on any machine: nothing in it is of a device
    twin = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    twin.load_state_dict(move(loaded["model"], CPU))
    move(twin, dev1)

    assert {t.device for t in tensors(loaded)} == {CPU}
    assert all(
        torch.equal(a.cpu(), b.cpu())
        for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert loaded["optim"]["state"][0]["exp_avg"].device == CPU


# What fails


def test_a_leaf_that_fails_is_named_and_nothing_is_left(dev: torch.device, driver: Driver) -> None:
    model = nn.Linear(2, 2)
    batch = {"net": model, "image": [torch.ones(2), {"mask": torch.ones(4)}]}
    held = snapshot(batch)

    driver.fail_after(4)
    with pytest.raises(MoveError, match="out of memory") as info:
        move(batch, dev)

    assert info.value.path == "batch['image'][1]['mask']"
    assert info.value.target == dev
    assert isinstance(info.value.__cause__, torch.OutOfMemoryError)
    assert device_of(model) == CPU
    assert snapshot(batch) == held


@pytest.mark.machine("mps")
@pytest.mark.parametrize(
    ("dtype", "narrower"),
    [(torch.float64, torch.float32), (torch.complex128, torch.complex64)],
    ids=str,
)
def test_mps_has_no_double_precision(
    dtype: torch.dtype, narrower: torch.dtype, dev: torch.device
) -> None:
    batch = {"x": [torch.ones(2), torch.ones(2, dtype=dtype)]}

    with pytest.raises(MoveError, match=r"batch\['x'\]\[1\] .*downcast=True") as info:
        move(batch, dev)
    moved = move(batch, dev, downcast=True)

    assert info.value.path == "batch['x'][1]"
    assert moved["x"][1].dtype == narrower
    assert moved["x"][1].device == dev
    assert batch["x"][1].dtype == dtype
    assert move(moved, dev, downcast=True) is moved


@pytest.mark.machine("cuda")
@pytest.mark.driver
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("x", [torch.ones(2), nn.Linear(2, 2)], ids=["tensor", "module"])
def test_a_forked_child_of_a_process_that_uses_cuda(x: Any, dev: torch.device) -> None:
    torch.ones(1, device=dev)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = "it could"
        try:
            move([x], dev)
        except DeviceError as error:
            message = str(error)
        os.write(writer, message.encode())
        os._exit(0)
    os.waitpid(child, 0)

    said = os.read(reader, 2000).decode()
    os.close(reader)
    os.close(writer)

    assert "was forked from one that had started CUDA" in said
    assert "call move() in the loop" in said
