"""move() as it is called: what it skips, how it names what failed, and what it refuses."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import devicekit


class Failing:
    def to(self, device: Any) -> Any:
        msg = "out of order"
        raise ValueError(msg)


class Point(NamedTuple):
    keep: Any
    x: Any


@dataclasses.dataclass
class Data:
    keep: Any
    x: Any


@dataclasses.dataclass(slots=True, frozen=True)
class SlottedData:
    keep: Any
    x: Any


@attrs.frozen
class AttrsData:
    keep: Any
    x: Any


class Attributes(dict[str, Any]):
    def __init__(self, keep: Any, x: Any) -> None:
        super().__init__(other=x)
        self.keep = keep
        self.x = x


class Store(collections.abc.Mapping[str, Any]):
    def __init__(self, **items: Any) -> None:
        self._store = items

    def __getitem__(self, key: str) -> Any:
        return self._store[key]

    def __iter__(self) -> Any:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)


def named(x: Any, name: str) -> Any:
    return x[name] if isinstance(x, collections.abc.Mapping) and name in x else getattr(x, name)


# ---- keys to skip --------------------------------------------------------------------------------

NAMED: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda keep, x: {"keep": keep, "x": x},
    "OrderedDict": lambda keep, x: collections.OrderedDict(keep=keep, x=x),
    "defaultdict": lambda keep, x: collections.defaultdict(list, keep=keep, x=x),
    "ChainMap": lambda keep, x: collections.ChainMap({"keep": keep}, {"x": x}),
    "UserDict": lambda keep, x: collections.UserDict(keep=keep, x=x),
    "Mapping": lambda keep, x: Store(keep=keep, x=x),
    "MappingProxyType": lambda keep, x: types.MappingProxyType({"keep": keep, "x": x}),
    "attributes of a dict": Attributes,
    "namedtuple": Point,
    "dataclass": Data,
    "slots dataclass": SlottedData,
    "attrs": AttrsData,
    "SimpleNamespace": lambda keep, x: types.SimpleNamespace(keep=keep, x=x),
    "Namespace": lambda keep, x: argparse.Namespace(keep=keep, x=x),
}
SKIP = {
    "str": "keep",
    "list": ["other name", "keep"],
    "set": {"keep"},
    "tuple": ("keep",),
    "keys": {"keep": 1}.keys(),
}


@pytest.mark.parametrize("skip", list(SKIP))
@pytest.mark.parametrize("name", list(NAMED))
def test_keys_and_attributes_are_skipped_at_every_depth(name: str, skip: str) -> None:
    inner = NAMED[name]([torch.zeros(1)], torch.zeros(2))
    outer = NAMED[name]({"x": torch.zeros(3)}, [{"deep": (inner,)}])

    moved = devicekit.move([outer], "meta", skip_keys=SKIP[skip])[0]

    assert type(moved) is type(outer)
    assert named(moved, "keep") is named(outer, "keep")
    deep = named(moved, "x")[0]["deep"][0]
    assert named(deep, "keep") is named(inner, "keep")
    assert named(deep, "keep")[0].device.type == "cpu"
    assert named(deep, "x").device.type == "meta"


@pytest.mark.parametrize("name", list(NAMED))
def test_nothing_to_do_but_what_is_skipped_gives_the_same_object(name: str) -> None:
    x = NAMED[name](torch.zeros(1), 1)

    assert devicekit.move(x, "meta", skip_keys="keep") is x


@pytest.mark.parametrize("kind", [dict, collections.UserDict, collections.ChainMap, Store])
@pytest.mark.parametrize("key", ["data", "maps"])
def test_the_key_is_meant_and_not_where_a_mapping_keeps_its_items(kind: Any, key: str) -> None:
    batch = {key: torch.zeros(1), "x": torch.zeros(2)}
    x = kind(batch) if kind is not Store else Store(**batch)

    moved = devicekit.move(x, "meta", skip_keys=[key])

    assert moved[key] is x[key]
    assert moved["x"].device.type == "meta"


def test_fields_of_torch_s_named_tuples_are_skipped() -> None:
    x = torch.zeros(2, 3).max(dim=0)

    moved = devicekit.move(x, "meta", skip_keys="indices")

    assert moved.indices is x.indices
    assert moved.values.device.type == "meta"


@pytest.mark.parametrize("key", [1, None, ("keep",), b"keep", 2.5, str])
def test_keys_that_are_no_names_are_not_skipped(key: Any) -> None:
    x = {key: torch.zeros(1), "keep": torch.zeros(2)}

    moved = devicekit.move({"x": x}, "meta", skip_keys=["keep", str(key)])["x"]

    assert list(moved) == [key, "keep"]
    assert moved[key].device.type == "meta"
    assert moved["keep"] is x["keep"]


def test_what_is_skipped_here_may_move_there() -> None:
    shared = [torch.zeros(1)]

    moved = devicekit.move({"keep": shared, "x": shared}, "meta", skip_keys="keep")

    assert moved["keep"] is shared
    assert moved["x"][0].device.type == "meta"


def test_what_is_skipped_is_neither_moved_nor_named() -> None:
    net = nn.Linear(1, 1)
    x = {"keep": [net, Failing(), types.SimpleNamespace(x=torch.zeros(1))], "x": torch.zeros(1)}

    moved = devicekit.move(x, "meta", skip_keys="keep", strict=True)

    assert moved["keep"] is x["keep"]
    assert net.weight.device.type == "cpu"


def test_keys_are_skipped_in_structures_that_hold_themselves() -> None:
    x: dict[str, Any] = {"keep": torch.zeros(1), "x": torch.zeros(2)}
    x["me"] = [x]

    moved = devicekit.move(x, "meta", skip_keys="keep")

    assert moved["me"][0] is moved
    assert moved["keep"] is x["keep"]
    assert moved["x"].device.type == "meta"


# ---- paths ---------------------------------------------------------------------------------------

PATHS: dict[str, Callable[[Any], Any]] = {
    "batch": lambda bad: bad,
    "batch['image'][0].mask": lambda bad: {"image": [types.SimpleNamespace(mask=bad)]},
    "batch[0][1]": lambda bad: [(1, bad)],
    "batch.x": lambda bad: Point(1, bad),
    "batch['p'].keep[2]": lambda bad: {"p": Point([1, 2, bad], 1)},
    "batch.x.keep": lambda bad: Data(1, SlottedData(bad, 1)),
    "batch[1][('a', 2)][None]": lambda bad: {1: {("a", 2): {None: bad}}},
    "batch['it\\'s \"x\"']": lambda bad: {'it\'s "x"': bad},
    "batch['a']['b']": lambda bad: collections.UserDict(a=types.MappingProxyType({"b": bad})),
    "batch.maps[1]['a']": lambda bad: collections.ChainMap({}, {"a": bad}),
    "batch[0][1] ": lambda bad: [collections.UserList([1, bad])],
    "batch.keep": lambda bad: Attributes(bad, 1),
    "batch[0].x": lambda bad: collections.deque([AttrsData(1, bad)]),
}


@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("options", [{}, {"skip_keys": ["no such key"]}], ids=["fast", "thorough"])
def test_what_could_not_be_moved_is_named_by_its_path(path: str, options: Any) -> None:
    x = PATHS[path](Failing())

    with pytest.raises(devicekit.MoveError, match="out of order") as caught:
        devicekit.move(x, "meta", **options)

    error = caught.value
    assert error.path == path.strip()
    assert error.target == torch.device("meta")
    assert str(error).startswith(f"{path.strip()} could not be moved to meta: out of order.")
    assert isinstance(error.__cause__, ValueError)


def test_the_path_can_be_evaluated() -> None:
    batch = {"it's": [Point(0, {1.5: types.SimpleNamespace(mask=Failing())})]}

    with pytest.raises(devicekit.MoveError, match="out of order") as caught:
        devicekit.move(batch, "meta")
    assert isinstance(eval(caught.value.path or "", {"batch": batch}), Failing)


def test_a_tensor_that_cannot_be_moved_is_named() -> None:
    class Stuck(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            msg = "out of memory\nand a long story"
            raise torch.OutOfMemoryError(msg)

    stuck = torch.zeros(1).as_subclass(Stuck)

    with pytest.raises(devicekit.MoveError, match=r"out of memory\.$") as caught:
        devicekit.move({"x": [torch.zeros(1), stuck]}, "meta")
    assert caught.value.path == "batch['x'][1]"
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("options", [{}, {"skip_keys": ["no such key"]}], ids=["fast", "thorough"])
def test_a_hash_that_needs_values_is_named(kind: Any, options: Any) -> None:
    """A set finds its members by their hash, which may ask for what a meta tensor does not have."""

    class ByValue:
        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __hash__(self) -> int:
            return hash(float(self.x))

        def to(self, device: Any) -> Any:
            return ByValue(self.x.to(device))

    x = {"s": kind([ByValue(torch.zeros(()))])}

    with pytest.raises(devicekit.MoveError, match="could not be moved") as caught:
        devicekit.move(x, "meta", **options)
    assert caught.value.path == "batch['s']"


def test_nothing_changes_where_something_fails() -> None:
    net = nn.Linear(1, 1)
    x = [torch.zeros(1), net, {"x": Failing()}]

    with pytest.raises(devicekit.MoveError, match="out of order"):
        devicekit.move(x, "meta")
    assert x[0].device.type == net.weight.device.type == "cpu"  # type: ignore[union-attr]


# ---- the target and the order of arguments -------------------------------------------------------


@pytest.mark.parametrize("x", [None, {}, [], "text", 1, {"x": [1, 2]}, torch.zeros(1)], ids=repr)
@pytest.mark.parametrize("target", ["xpu:3", torch.device("xpu", 3)], ids=repr)
def test_a_target_that_is_missing_is_refused_even_where_nothing_moves(x: Any, target: Any) -> None:
    with pytest.raises(devicekit.DeviceUnavailableError, match="xpu:3"):
        devicekit.move(x, target)
    with pytest.raises(devicekit.DeviceUnavailableError, match="xpu:3"):
        devicekit.move(x, target, skip_keys="x", non_blocking=True)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("cpu", {"x": 1}, r"write move\(batch, 'cpu'\), not move\('cpu', batch\)"),
        (torch.device("cpu"), [1], r"write move\(batch, 'cpu'\)"),
        (torch.device("cpu"), torch.zeros(1), r"the data comes first"),
        ({"x": 1}, nn.Linear(1, 1), r"write move\(model, batch\), not move\(batch, model\)"),
        ("cpu", nn.Linear(1, 1), r"the data comes first"),
        ({"x": 1}, {"y": 1}, r"neither a device nor a batch for a model"),
        ({"x": 1}, None, r"None is neither a device nor"),
        (nn.Linear(1, 1), None, r"None is neither a device nor"),
        ([1], 2.5, r"2.5 is neither a device nor"),
    ],
)
def test_arguments_in_the_wrong_order_name_the_right_form(
    first: Any, second: Any, message: str
) -> None:
    with pytest.raises(devicekit.InvalidDeviceError, match=message):
        devicekit.move(first, second)


def test_what_is_no_device_is_shown_in_short() -> None:
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]

    for batch in (deep, dict.fromkeys(range(10000), "long " * 100)):
        with pytest.raises(devicekit.InvalidDeviceError, match="neither a device") as caught:
            devicekit.move({"x": 1}, batch)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["generator", "iterator", "parameters"])
def test_an_iterator_is_refused_because_a_move_would_use_it_up(kind: str) -> None:
    x = {
        "generator": lambda: (t for t in [torch.ones(1)]),
        "iterator": lambda: iter([torch.ones(1)]),
        "parameters": lambda: torch.nn.Linear(1, 1).parameters(),
    }[kind]()

    with pytest.raises(devicekit.MoveError, match="make a list of it, or use prefetch"):
        devicekit.move(x, "meta")

    assert next(x).device.type == "cpu"


def test_an_index_of_numpy_is_a_device_and_no_batch() -> None:
    with pytest.raises(devicekit.DeviceUnavailableError, match="current accelerator"):
        devicekit.move(torch.nn.Linear(1, 1), np.int64(0))


def test_a_weak_proxy_is_refused_because_it_only_stands_for_an_object() -> None:
    model = torch.nn.Linear(1, 1)

    for options in ({}, {"skip_keys": ["x"]}):
        with pytest.raises(devicekit.MoveError, match="pass the object itself"):
            devicekit.move(weakref.proxy(model), "meta", **options)

    assert model.weight.device.type == "cpu"
    batch = torch.ones(1)
    assert devicekit.move(weakref.proxy(model), batch) is batch


@pytest.mark.parametrize("names", [1, [1], [["x"]], ("x", None)], ids=repr)
def test_skip_keys_are_names(names: Any) -> None:
    with pytest.raises(TypeError, match="expected the names of keys and attributes"):
        devicekit.move({"x": torch.ones(1)}, "meta", skip_keys=names)


def test_an_object_that_lets_nobody_look_into_it_passes_through() -> None:
    class Closed:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError

    x = Closed()

    assert devicekit.move([x, torch.ones(1)], "meta")[0] is x
    assert devicekit.device_of(x, None) is None
