"""move() on every kind of container: what comes back is what came in, somewhere else."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from anatomy import anatomy, contents, snapshot, tensors_in
from containers import CALLS, CONTAINERS, Frozen, Pair, Plain, Tagged
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

import devicekit

# There are two ways through a structure; a call with keys to skip takes the thorough one.
WAYS = {"fast": {}, "thorough": {"skip_keys": ["no such key"]}}


@pytest.fixture(params=list(WAYS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@pytest.fixture(params=list(CONTAINERS))
def container(request: pytest.FixtureRequest) -> Any:
    made = CONTAINERS[request.param](torch.zeros(1), torch.zeros(2))
    CALLS.clear()
    return made


def devices_in(x: Any) -> set[str]:
    return {tensor.device.type for tensor in tensors_in(x)}


# ---- every kind ----------------------------------------------------------------------------------


def test_every_container_moves(container: Any, options: dict[str, Any]) -> None:
    moved = devicekit.move(container, "meta", **options)

    assert moved is not container
    assert devices_in(moved) == {"meta"}


def test_every_container_keeps_its_type_and_all_it_carries(
    container: Any, options: dict[str, Any]
) -> None:
    before = anatomy(container)

    moved = devicekit.move(container, "meta", **options)

    assert anatomy(moved) == before
    assert len(tensors_in(moved)) == 2


@pytest.mark.parametrize("here", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_every_container_is_the_same_object_where_nothing_moves(
    container: Any, here: Any, options: dict[str, Any]
) -> None:
    assert devicekit.move(container, here, **options) is container


def test_no_input_is_changed(container: Any, options: dict[str, Any]) -> None:
    before = snapshot(container)

    devicekit.move(container, "meta", **options)

    assert snapshot(container) == before


def test_none_of_the_caller_s_code_runs(container: Any, options: dict[str, Any]) -> None:
    devicekit.move(container, "meta", **options)

    assert CALLS == []


def test_every_container_moves_inside_every_other(container: Any) -> None:
    nested = [make(container, [container]) for make in CONTAINERS.values()]

    moved = devicekit.move(nested, "meta")

    assert anatomy(moved) == anatomy(nested)
    assert devices_in(moved) == {"meta"}


@pytest.mark.parametrize("name", list(CONTAINERS))
def test_what_holds_no_tensor_stays_the_same_object(name: str) -> None:
    x = CONTAINERS[name]("text", 1)

    assert devicekit.move(x, "meta") is x
    assert devicekit.move([x, torch.zeros(1)], "meta")[0] is x


# ---- kinds of their own --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_move(kind: type, options: dict[str, Any]) -> None:
    x = kind([torch.zeros(1), torch.zeros(2), "text", Frozen(torch.zeros(3)), (torch.zeros(4),)])
    before = snapshot(x)

    moved = devicekit.move(x, "meta", **options)

    assert type(moved) is kind
    assert anatomy(moved) == anatomy(x)
    assert devices_in(moved) == {"meta"}
    assert all(part in moved for part in moved)  # each is found by its new hash
    assert snapshot(x) == before
    assert devicekit.move(x, "cpu:0", **options) is x


def test_named_tuples_of_torch_move(options: dict[str, Any]) -> None:
    x = torch.zeros(2, 3).max(dim=0)

    moved = devicekit.move(x, "meta", **options)

    assert type(moved) is torch.return_types.max
    assert moved.values.device.type == moved.indices.device.type == "meta"
    assert devicekit.move(x, "cpu", **options) is x


def test_packed_sequences_move_and_keep_their_batch_sizes(options: dict[str, Any]) -> None:
    x = pack_sequence([torch.zeros(1), torch.zeros(2)], enforce_sorted=False)

    moved = devicekit.move({"x": x}, "meta", **options)["x"]

    assert type(moved) is type(x)
    assert moved.data.device.type == moved.sorted_indices.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"
    assert devicekit.move(x, "cpu", **options) is x


def test_the_mapping_behind_a_proxy_stays_shared(options: dict[str, Any]) -> None:
    behind = collections.OrderedDict(x=torch.zeros(1))
    batch = [types.MappingProxyType(behind), behind]

    proxy, moved = devicekit.move(batch, "meta", **options)
    moved["y"] = 1

    assert list(proxy) == ["x", "y"]
    assert type(proxy.copy()) is collections.OrderedDict


def test_a_dict_that_is_its_dict_stays_one(options: dict[str, Any]) -> None:
    moved = devicekit.move(CONTAINERS["dict that is its __dict__"](torch.zeros(1), 1), "meta")
    moved["new"] = 2

    assert moved.new == 2


@pytest.mark.parametrize("first", [False, True])
def test_ordered_dicts_keep_an_order_that_was_changed(first: bool, options: dict[str, Any]) -> None:
    x = collections.OrderedDict(a=torch.zeros(1), b=2, c=torch.zeros(3))
    x.move_to_end("b", last=not first)

    moved = devicekit.move(x, "meta", **options)

    assert list(moved) == list(x)
    assert moved.popitem()[0] == list(x)[-1]


def test_default_factories_and_length_limits_still_work(options: dict[str, Any]) -> None:
    x = [collections.defaultdict(list, a=torch.zeros(1)), collections.deque([torch.zeros(2)], 1)]

    table, queue = devicekit.move(x, "meta", **options)
    queue.append(1)

    assert table["missing"] == []
    assert list(queue) == [1]


def test_cached_properties_move_with_what_they_were_computed_from(options: dict[str, Any]) -> None:
    x = Plain(torch.zeros(1), 1)
    assert x.both[0] is x.left

    moved = devicekit.move(x, "meta", **options)

    assert moved.both[0] is moved.left
    assert moved.left.device.type == "meta"


def test_private_names_are_mangled_with_their_own_class(options: dict[str, Any]) -> None:
    class Base:
        __slots__ = ("__x",)

        def __init__(self, x: Tensor) -> None:
            self.__x = x

    @dataclasses.dataclass
    class __Child(Base):  # the point of the test
        __slots__ = ("__x",)

        def __init__(self, base: Tensor, own: Tensor) -> None:
            super().__init__(base)
            self.__x = own

    moved = devicekit.move(__Child(torch.zeros(1), torch.zeros(2)), "meta", **options)

    assert moved._Base__x.shape == (1,)
    assert moved._Child__x.shape == (2,)
    assert moved._Base__x.device.type == moved._Child__x.device.type == "meta"


def test_a_property_that_hides_a_slot_does_not_run(options: dict[str, Any]) -> None:
    @dataclasses.dataclass(slots=True)
    class Base:
        x: Any

    class Child(Base):
        __slots__ = ()

        @property
        def x(self) -> Any:
            raise AssertionError

    child = object.__new__(Child)
    Base.x.__set__(child, torch.zeros(1))  # type: ignore[attr-defined]

    moved = devicekit.move(child, "meta", **options)

    assert Base.x.__get__(moved).device.type == "meta"  # type: ignore[attr-defined]


# ---- what passes through -------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = torch.zeros(1)


class Size(float, enum.Enum):
    BIG = 2.0


LEAVES = (
    *("text", b"bytes", bytearray(b"x"), 1, 2.5, 1j, True, None, ..., range(3), slice(1)),
    *(np.ones(2), np.float32(1), torch.float32, torch.device("cpu"), torch.Size([1])),
    *(Tensor, Plain, Pair, torch.nn.Linear, int, len, print, lambda x: x, torch.zeros, torch),
    *(Colour.RED, Size.BIG, memoryview(b"x"), torch.Generator(), [], {}, (), set(), frozenset()),
)


@pytest.mark.parametrize("leaf", LEAVES, ids=[f"{i}" for i in range(len(LEAVES))])
def test_what_is_no_tensor_passes_through(leaf: Any, options: dict[str, Any]) -> None:
    assert devicekit.move(leaf, "meta", **options) is leaf
    assert devicekit.move({"x": leaf, "t": torch.zeros(1)}, "meta", **options)["x"] is leaf


@dataclasses.dataclass
class Metres(float):
    """A number; its value is in no attribute."""

    unit: Any = None

    def __new__(cls, value: float, unit: Any) -> Any:
        return super().__new__(cls, value)

    def __init__(self, value: float, unit: Any) -> None:
        self.unit = unit


@dataclasses.dataclass
class SomeError(Exception):
    where: Any


@pytest.mark.parametrize("x", [Metres(2.5, torch.zeros(1)), SomeError(torch.zeros(1))])
def test_a_dataclass_that_is_more_than_its_attributes_is_named_and_kept(x: Any) -> None:
    with pytest.warns(UserWarning, match=type(x).__name__):
        moved = devicekit.move([x], "meta")

    assert moved == [x]


def test_weak_dictionaries_are_kept() -> None:
    key = Tagged("tag", {}, None)
    x = weakref.WeakValueDictionary(key=key)

    assert devicekit.move([x, torch.zeros(1)], "meta")[0] is x


def test_a_container_s_parts_are_its_own_and_not_what_it_shows() -> None:
    class Doubling(list[Any]):
        def __iter__(self) -> Any:
            return (part for item in list.__iter__(self) for part in (item, item))

    moved = devicekit.move(Doubling([torch.zeros(1)]), "meta")

    assert [key for key, _ in contents(moved)] == [0]


def test_many_types_may_pass(options: dict[str, Any]) -> None:
    """Classes made anew for every batch do not pile up, and what is built in is not forgotten."""
    for i in range(4200):
        cls = type(f"Made{i}", (), {})
        assert type(devicekit.move([cls(), torch.zeros(1)], "meta", **options)[0]) is cls

    assert devicekit.move({"x": [torch.zeros(1)]}, "meta")["x"][0].device.type == "meta"
