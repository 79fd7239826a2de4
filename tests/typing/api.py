"""What a type checker makes of devicekit: read by mypy and pyright, never run.

`assert_type` pins what is inferred. A wrong call carries the error it must cause, for both
checkers; if it were accepted, the unused comment would be the error.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import devicekit
from devicekit.testing import fake_devices


class Net(nn.Module):
    pass


class Item(TypedDict):
    image: Tensor
    label: int


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Batch:
    x: Tensor


# ---- choosing and checking -----------------------------------------------------------------------


def choosing(spec: devicekit.DeviceLike, found: devicekit.DeviceInfo) -> None:
    assert_type(devicekit.device("cuda:1"), torch.device)
    assert_type(devicekit.device(0), torch.device)
    assert_type(devicekit.device(torch.device("cpu")), torch.device)
    assert_type(devicekit.device(spec), torch.device)
    assert_type(devicekit.auto(), torch.device)
    assert_type(devicekit.auto(prefer="cuda"), torch.device)
    assert_type(devicekit.auto(prefer=("xpu", "cuda"), min_free="8GiB"), torch.device)
    assert_type(devicekit.auto(min_free=2**30), torch.device)
    assert_type(devicekit.devices(), tuple[devicekit.DeviceInfo, ...])

    assert_type(found.device, torch.device)
    assert_type(found.name, str)
    assert_type(found.free_memory, int | None)
    assert_type(found.capability, tuple[int, int] | None)
    assert_type(found.usable, bool)
    found.usable = True  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]

    devicekit.device(3.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    devicekit.device(None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    devicekit.device(spec="cpu")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    devicekit.auto("cuda")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    devicekit.auto(prefer=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    devicekit.auto(min_free=1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- moving --------------------------------------------------------------------------------------


def moving_to_auto(net: Net, x: Tensor, batch: dict[str, Tensor]) -> None:
    assert_type(devicekit.move(net), Net)
    assert_type(devicekit.move(x), Tensor)
    assert_type(devicekit.move(batch), dict[str, Tensor])


def moving_to_a_device(net: Net, x: Tensor, item: Item, optimizer: torch.optim.Adam) -> None:
    assert_type(devicekit.move(net, "cuda"), Net)
    assert_type(devicekit.move(net, torch.device("cpu")), Net)
    assert_type(devicekit.move(x, 0), Tensor)
    assert_type(devicekit.move(item, "cpu"), Item)
    assert_type(devicekit.move(Batch(x), "cpu"), Batch)
    assert_type(devicekit.move(Pair(x, x), "cpu"), Pair)
    assert_type(devicekit.move([x], "cpu"), list[Tensor])
    assert_type(devicekit.move((x, item), "cpu"), tuple[Tensor, Item])
    assert_type(devicekit.move(defaultdict(list, a=[x]), "cpu"), defaultdict[str, list[Tensor]])
    assert_type(devicekit.move(optimizer), torch.optim.Adam)


def moving_to_a_model(
    net: Net, x: Tensor, item: Item, ordered: OrderedDict[str, Tensor], maybe: Tensor | None
) -> None:
    assert_type(devicekit.move(net, x), Tensor)
    assert_type(devicekit.move(net, item), Item)
    assert_type(devicekit.move(net, Batch(x)), Batch)
    assert_type(devicekit.move(net, ordered), OrderedDict[str, Tensor])
    assert_type(devicekit.move(net, maybe), Tensor | None)


def moving_in_a_loop(net: Net, loader: Iterable[Item]) -> None:
    for item in loader:
        item = devicekit.move(net, item)
        assert_type(item, Item)


def moving_with_options(net: Net, x: Tensor) -> None:
    assert_type(devicekit.move(x, non_blocking=True), Tensor)
    assert_type(devicekit.move(x, "cpu", skip_keys=("labels",), strict=True), Tensor)
    assert_type(devicekit.move(net, x, downcast=True), Tensor)

    devicekit.move()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    devicekit.move(x, net)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    devicekit.move(x, 1.5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    devicekit.move(x, "cpu", True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    devicekit.move(x, device="cpu")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


# ---- finding -------------------------------------------------------------------------------------


def finding(net: Net, x: Tensor) -> None:
    assert_type(devicekit.device_of(net), torch.device)
    assert_type(devicekit.device_of([x]), torch.device)
    assert_type(devicekit.device_of(net, None), torch.device | None)
    assert_type(devicekit.device_of(net, "none"), torch.device | str)
    assert_type(devicekit.inspect(net), devicekit.DeviceReport)
    assert_type(devicekit.inspect(net).device, torch.device)


# ---- models and loops ----------------------------------------------------------------------------


def wrapping(net: Net, loader: list[dict[str, Tensor]]) -> None:
    assert_type(devicekit.wrap(net), Net)
    assert_type(devicekit.unwrap(net), Net)
    for batch in devicekit.prefetch(loader, net):
        assert_type(batch, dict[str, Tensor])
    assert_type(devicekit.diagnose(), devicekit.Diagnosis)


# ---- errors and testing --------------------------------------------------------------------------


def refusing(error: devicekit.DeviceUnavailableError, wrong: devicekit.MoveError) -> None:
    assert_type(error.requested, str | None)
    assert_type(error.available, tuple[torch.device, ...])
    assert_type(wrong.path, str | None)
    assert_type(wrong.target, torch.device | None)


def errors_have_builtin_bases() -> tuple[ValueError, LookupError, RuntimeError]:
    return devicekit.InvalidDeviceError(), devicekit.NoDeviceError(), devicekit.MoveError()


def pretending() -> None:
    with fake_devices(cuda=2, names=["a", "b"], free_memory="4GiB", capability=(9, 0)):
        assert_type(devicekit.auto(), torch.device)

    fake_devices(2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    fake_devices(cuda="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
