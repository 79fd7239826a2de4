"""`prefetch` where there is no stream: what is promised everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import devicekit
from devicekit import _prefetch
from devicekit.testing import fake_devices


def batches(number: int = 3) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((2,), float(i))} for i in range(number)]


def test_batches_arrive_moved_and_in_order() -> None:
    moved = list(devicekit.prefetch(batches(), "meta"))

    assert [batch["x"].device.type for batch in moved] == ["meta"] * 3


def test_batches_that_are_there_stay_the_same_objects() -> None:
    loader = batches()

    moved = list(devicekit.prefetch(loader, nn.Linear(1, 1)))

    assert all(a is b for a, b in zip(moved, loader, strict=True))


def test_several_passes_iterate_the_loader_anew() -> None:
    loader = devicekit.prefetch(batches(), "cpu")

    assert [len(list(loader)) for _ in range(3)] == [3, 3, 3]


def test_the_model_is_asked_again_at_each_pass() -> None:
    model = nn.Linear(1, 1)
    loader = devicekit.prefetch(batches(), model)
    first = next(iter(loader))["x"].device
    devicekit.move(model, "meta")

    assert (first.type, next(iter(loader))["x"].device.type) == ("cpu", "meta")


def test_an_empty_loader_yields_nothing() -> None:
    assert list(devicekit.prefetch([], "cpu")) == []


def test_it_has_a_length_if_the_loader_has_one() -> None:
    assert len(devicekit.prefetch(batches(), "cpu")) == 3


def test_it_has_no_length_if_the_loader_has_none() -> None:
    with pytest.raises(TypeError, match="generator has no length"):
        len(devicekit.prefetch((b for b in batches()), "cpu"))


def test_an_exception_of_the_loader_comes_where_its_batch_would_have_come() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        msg = "the disk is full"
        raise OSError(msg)

    loader = iter(devicekit.prefetch(broken(), "cpu"))

    assert next(loader).shape == (1,)
    with pytest.raises(OSError, match="the disk is full"):
        next(loader)


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, None])
def test_a_depth_that_is_no_number_of_batches_is_refused(depth: object) -> None:
    with pytest.raises(ValueError, match="expected how many batches to move ahead"):
        devicekit.prefetch([], "cpu", depth=depth)  # type: ignore[arg-type]


def test_a_missing_device_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(devicekit.DeviceUnavailableError, match="'xpu:7' is not available"):
        devicekit.prefetch([], "xpu:7")


def test_a_model_without_tensors_has_no_place_for_batches() -> None:
    with pytest.raises(devicekit.NoDeviceError, match="ReLU holds no tensor"):
        iter(devicekit.prefetch([], nn.ReLU()))


def test_the_loader_comes_first() -> None:
    with pytest.raises(devicekit.InvalidDeviceError, match=r"write prefetch\(loader, model\)"):
        devicekit.prefetch(nn.Linear(1, 1), batches())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loader", [5, None, torch.device("cpu"), "cpu", b"cpu", nn.Linear, object()], ids=ascii
)
def test_what_cannot_be_iterated_is_no_loader(loader: object) -> None:
    message = r"is no loader: expected a DataLoader.* Write prefetch\(loader, model\)"

    with pytest.raises(TypeError, match=message):
        devicekit.prefetch(loader, "cpu")  # type: ignore[call-overload]


def test_what_is_iterated_by_its_items_is_a_loader() -> None:
    class Items:
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.ones(2)[index : index + 1].reshape(1)

    with pytest.raises(RuntimeError, match="shape"):  # it has no end but this one
        list(devicekit.prefetch(Items(), "cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_fake_devices_hold_no_batches(device_type: str) -> None:
    if torch.get_device_module(device_type).is_available():
        pytest.skip("a device of this name is real here")
    with fake_devices(**{device_type: 1}):  # type: ignore[arg-type]
        loader = devicekit.prefetch(batches(), device_type)
        message = rf"could not be moved to {device_type}:0: it is a device of fake_devices\(\)"
        with pytest.raises(devicekit.MoveError, match=message) as caught:
            next(iter(loader))

        with (
            mock.patch.object(_prefetch, "pretended", return_value=None),  # it might be real
            pytest.raises(RuntimeError, match="support"),
        ):
            next(iter(loader))

    assert caught.value.target == torch.device(device_type, 0)
    assert caught.value.__cause__ is not None
