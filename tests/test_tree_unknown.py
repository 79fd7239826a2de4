"""move() on objects that nobody knows how to move: named where they hold tensors, else silent."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from anatomy import snapshot
from torch import Tensor, nn
from work import at_most

import devicekit

WAYS = {"fast": {}, "thorough": {"skip_keys": ["no such key"]}}


@pytest.fixture(params=list(WAYS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


class Unknown:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Sent:
    """It has a `.to`, which nobody calls inside an unknown object."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: Any) -> Any:
        raise AssertionError


class UnknownSlots:
    __slots__ = ("__x", "unset")

    def __init__(self, x: Any) -> None:
        self.__x = x


class Model:
    """As a model of pydantic: fields in the `__dict__`, the rest in slots."""

    __slots__ = ("__dict__", "__fields_set__", "__private__")

    def __init__(self, **fields: Any) -> None:
        object.__setattr__(self, "__dict__", fields)
        object.__setattr__(self, "__fields_set__", set(fields))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


def _keyword(x: Any = None) -> None:
    """Something to bind arguments to."""


def _begun(tensor: Tensor) -> Iterator[int]:
    def generator() -> Iterator[int]:
        held = [tensor]
        yield len(held)
        yield held[0].dim()

    begun = generator()
    next(begun)
    return begun


UNKNOWN = {
    "object": lambda t: Unknown(x=t),
    "object in which it is deep": lambda t: Unknown(x=Unknown(y=[{"z": (t,)}])),
    "slots": UnknownSlots,
    "pydantic": lambda t: Model(x=t),
    "partial": lambda t: functools.partial(_keyword, t),
    "partial with keywords": lambda t: functools.partial(_keyword, x=[t]),
    "dict values": lambda t: {"x": t}.values(),
    "dict items": lambda t: {"x": t}.items(),
    "values of an OrderedDict": lambda t: collections.OrderedDict(x=t).values(),
    "module": lambda t: Unknown(net=nn.Linear(1, 1)),
    "optimizer": lambda t: Unknown(opt=torch.optim.SGD([t], 0.1)),
    "distribution": lambda t: torch.distributions.Normal(t, 1.0),
    "object with its own to inside": lambda t: Unknown(x=Sent(t)),
    "exception": lambda t: ValueError("text", t),
    "iterator": lambda t: iter([t]),
    "iterator of a dict": lambda t: iter({"x": t}.items()),
    "map": lambda t: map(abs, [t]),
    "zip": lambda t: zip([t], [1], strict=True),
    "chain": lambda t: itertools.chain([1], [t]),
    "generator": lambda t: (x for x in [t]),
    "generator that has begun": _begun,
    "cycle": lambda t: itertools.cycle([t]),
}


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_an_unknown_object_that_holds_tensors_is_named(name: str, options: Any) -> None:
    x = UNKNOWN[name](torch.zeros(1))
    batch = {"t": torch.zeros(1), "x": [x]}
    kind = type(x).__name__

    with pytest.warns(UserWarning, match=rf"batch\['x'\]\[0\] \({kind}\)") as caught:
        moved = devicekit.move(batch, "meta", **options)

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert moved["x"] is batch["x"]
    assert moved["t"].device.type == "meta"


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_an_unknown_object_is_refused_when_strict(name: str, options: Any) -> None:
    batch = {"t": torch.zeros(1), "x": [UNKNOWN[name](torch.zeros(1))]}
    before = snapshot(batch)

    with pytest.raises(devicekit.MoveError, match="register") as caught:
        devicekit.move(batch, "meta", strict=True, **options)

    assert caught.value.path == "batch['x'][0]"
    assert caught.value.target == torch.device("meta")
    assert snapshot(batch) == before


def test_a_module_that_moved_is_moved_back_when_strict() -> None:
    net = nn.Linear(1, 1)
    weight = net.weight

    with pytest.raises(devicekit.MoveError, match="register"):
        devicekit.move([net, Unknown(x=torch.zeros(1))], "meta", strict=True)

    assert net.weight is weight
    assert weight.device.type == "cpu"


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_an_unknown_object_is_not_named_where_its_tensors_are(name: str, options: Any) -> None:
    x = [UNKNOWN[name](torch.zeros(1))]

    assert devicekit.move(x, "cpu:0", strict=True, **options) is x


@pytest.mark.parametrize("levels", [2, 500])
def test_unknown_objects_are_named_once_each_in_one_warning(levels: int) -> None:
    unknown = Unknown(x=torch.zeros(1))
    batch: Any = [unknown, {"again": unknown}, (UnknownSlots(torch.zeros(1)),)]
    for _ in range(levels):
        batch = [batch]

    with pytest.warns(UserWarning, match="holds? tensors") as caught:
        devicekit.move(batch, "meta")

    start = "batch" + "[0]" * levels
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"{start}[0], {start}[2][0] (Unknown, UnknownSlots)")


def test_thousands_of_unknown_objects_are_counted_and_not_listed() -> None:
    batch = [Unknown(x=torch.zeros(1)) for _ in range(3_000)]

    with pytest.warns(UserWarning, match="and 2995 more") as caught, at_most(calls=500_000):
        devicekit.move(batch, "meta")

    assert len(str(caught[0].message)) < 500


@pytest.fixture
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _big_graph() -> Unknown:
    """Half a million objects, and a cycle."""
    x = Unknown(rows=[Unknown(i=i, name=str(i)) for i in range(250_000)])
    x.me = x
    return x


SILENT = {
    "empty": Unknown,
    "object": lambda: Unknown(a=1, b="text", c=[np.ones(2)], d=Unknown()),
    "logger": lambda: logging.getLogger("some.logger"),
    "object with a logger": lambda: Unknown(
        log=logging.getLogger("some"), handler=logging.Handler()
    ),
    "module of Python": lambda: torch,
    "object with modules": lambda: Unknown(torch=torch, here=types, cls=nn.Linear, fn=torch.zeros),
    "module without parameters": lambda: Unknown(activation=nn.ReLU(), loss=nn.MSELoss()),
    "lock": threading.Lock,
    "thread": threading.current_thread,
    "generator": lambda: [(i for i in ())],
    "iterator": lambda: [itertools.count()],
    "partial": lambda: functools.partial(_keyword, 1),
    "method": lambda: Unknown(x=torch.zeros(1)).__repr__,
    "exception": lambda: ValueError("text"),
    "big graph": _big_graph,
    "a million numbers": lambda: Unknown(numbers=list(range(1_000_000))),
    "a million floats in a tuple": lambda: Unknown(numbers=tuple(map(float, range(1_000_000)))),
    "a million names": lambda: Unknown(names={str(i) for i in range(1_000_000)}),
}


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("name", list(SILENT))
def test_an_object_without_tensors_is_passed_in_silence_and_soon(name: str) -> None:
    x = SILENT[name]()
    batch = {"t": torch.zeros(1), "x": x}

    with at_most(calls=7_000_000):
        assert devicekit.move(batch, "meta", strict=True)["x"] is x
        assert devicekit.move(x, "meta", strict=True) is x


@pytest.mark.parametrize("much", [1_000_000, 100_000])
def test_a_tensor_near_at_hand_is_found_beside_however_much_else(much: int) -> None:
    def rows() -> Any:
        return list(range(much)) if much == 1_000_000 else [Unknown(i=i) for i in range(much)]

    x = Unknown(rows=rows(), x=[torch.zeros(1)], more=rows())

    with pytest.warns(UserWarning, match="Unknown"):
        devicekit.move(x, "meta")


def test_a_mock_of_a_tensor_is_no_tensor() -> None:
    class Lying:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            return Tensor

    x = [Lying()]

    assert devicekit.move(x, "meta", strict=True) is x
