"""move() on structures that share parts, hold themselves, or are deeper than Python recurses."""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from anatomy import anatomy, snapshot, tensors_in
from containers import CONTAINERS, Attrs, Frozen, FrozenSlotted, NamedPair, Pair, Plain, Slotted
from torch import Tensor
from work import at_most

import devicekit

DEEP = 20_000


def devices_in(x: Any) -> set[str]:
    return {tensor.device.type for tensor in tensors_in(x)}


@pytest.fixture
def quick() -> Iterator[None]:
    """The test would take for ever, or ten times as long, if it went wrong."""
    with at_most(calls=7_000_000):
        yield


# ---- sharing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CONTAINERS))
def test_what_is_shared_stays_shared(name: str) -> None:
    tensor = torch.zeros(1)
    shared = CONTAINERS[name](tensor, tensor)
    batch = {"a": shared, "b": [shared, tensor], "c": (shared,)}

    moved = devicekit.move(batch, "meta")

    assert moved["a"] is moved["b"][0] is moved["c"][0]
    assert tensors_in(moved) == [moved["b"][1]]
    assert anatomy(moved) == anatomy(batch)


def test_a_tensor_is_sent_once() -> None:
    class Counting(Tensor):
        sent = 0

        def to(self, *args: Any, **kwargs: Any) -> Any:
            Counting.sent += 1
            return super().to(*args, **kwargs)

    tensor = torch.zeros(1).as_subclass(Counting)

    devicekit.move({"a": tensor, "b": [tensor], "c": {"d": (tensor, tensor)}}, "meta")

    assert Counting.sent == 1


def test_views_of_one_memory_stay_two_tensors() -> None:
    whole = torch.zeros(4)

    moved = devicekit.move([whole, whole[:2], whole.view(2, 2)], "meta")

    assert [tuple(t.shape) for t in moved] == [(4,), (2,), (2, 2)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "level",
    [
        lambda x: [x, x],
        lambda x: {"a": x, "b": x},
        lambda x: (x, x),
        lambda x: Plain(x, x),
        lambda x: Slotted(x, x),
        lambda x: [{"a": x, "b": (x, [x])}, x],
        lambda x: types.MappingProxyType({"a": x, "b": x}),
    ],
    ids=["list", "dict", "tuple", "dataclass", "slots", "mixed", "proxy"],
)
def test_what_is_shared_at_every_level_is_visited_once(level: Callable[[Any], Any]) -> None:
    x: Any = torch.zeros(1)
    for _ in range(100):
        x = level(x)

    moved = devicekit.move(x, "meta")

    assert devicekit.move(x, "cpu:0") is x
    assert anatomy(moved) == anatomy(x)
    assert devices_in(moved) == {"meta"}


@pytest.mark.usefixtures("quick")
def test_what_is_shared_far_down_with_nothing_to_move_is_visited_once() -> None:
    x: Any = ["no tensor"]
    for _ in range(100):
        x = [x, x]

    assert devicekit.move(x, "meta") is x


# ---- cycles --------------------------------------------------------------------------------------


def closed(x: Any, close: Callable[[Any, Any], object], inner: Any | None = None) -> Any:
    """Return a structure after it was put into itself."""
    close(x, x if inner is None else inner)
    return x


def _held(name: str) -> Callable[[Any, Any], None]:
    return lambda x, part: object.__setattr__(x, name, part)


def _proxy(x: Any) -> Any:
    return types.MappingProxyType(x)


def _tuple_that_holds_itself() -> Any:
    x: Any = (torch.zeros(1), [])
    x[1].append(x)
    return x


def _tuples_that_hold_each_other() -> Any:
    inside: list[Any] = [torch.zeros(1)]
    outer = (inside,)
    inside += [(outer, 1), outer]
    return outer


def _set_that_holds_itself() -> Any:
    x = FrozenSlotted(left=torch.zeros(1), right=set())
    x.right.update([x, (x, "text")])
    return x


@dataclasses.dataclass(frozen=True)
class Member:
    """One whose hash is made of what it holds, but for the group that it is in."""

    x: Any
    group: Any = dataclasses.field(compare=False)
    pair: Any = ()
    back: Any = dataclasses.field(compare=False, default=())


@dataclasses.dataclass(frozen=True)
class EarlyMember:
    pair: Any
    group: Any = dataclasses.field(compare=False)
    back: Any = dataclasses.field(compare=False, default=())


def _frozenset_that_holds_itself(kind: Any = Member) -> Any:
    x = kind((torch.zeros(1),), None, (torch.zeros(2),))
    object.__setattr__(x, "group", frozenset([x, "text"]))
    return x


def _family() -> Any:
    parent: dict[str, Any] = {"x": torch.zeros(1), "children": []}
    for i in range(3):
        child = Slotted(torch.zeros(i + 2), parent)
        parent["children"].append(child)
        parent[f"child {i}"] = (child, parent["children"])
    return parent


CYCLES: dict[str, Callable[[], Any]] = {
    "list": lambda: closed([torch.zeros(1)], list.append),
    "dict": lambda: closed({"x": torch.zeros(1)}, lambda x, p: x.update(me=p)),
    "OrderedDict": lambda: closed(
        collections.OrderedDict(x=torch.zeros(1)), lambda x, p: x.update(me=p)
    ),
    "deque": lambda: closed(collections.deque([torch.zeros(1)]), collections.deque.append),
    "defaultdict": lambda: closed(
        collections.defaultdict(list, x=torch.zeros(1)), lambda x, p: x["me"].append(p)
    ),
    "UserDict": lambda: closed(collections.UserDict(x=torch.zeros(1)), lambda x, p: x.update(me=p)),
    "UserList": lambda: closed(collections.UserList([torch.zeros(1)]), collections.UserList.append),
    "SimpleNamespace": lambda: closed(types.SimpleNamespace(x=torch.zeros(1)), _held("me")),
    "dataclass": lambda: closed(Plain(torch.zeros(1), 1), _held("right")),
    "dataclass with more attributes": lambda: closed(Plain(torch.zeros(1), 1), _held("more")),
    "frozen dataclass": lambda: closed(Frozen(torch.zeros(1)), _held("right")),
    "slots dataclass": lambda: closed(Slotted(torch.zeros(1), 1), _held("right")),
    "frozen slots dataclass": lambda: closed(
        FrozenSlotted(left=torch.zeros(1), right=1), _held("right")
    ),
    "attrs": lambda: closed(Attrs(torch.zeros(1), 1), _held("right")),
    "namedtuple with attributes": lambda: closed(NamedPair(torch.zeros(1), 1), _held("note")),
    "tuple in a list": lambda: closed([torch.zeros(1)], lambda x, p: x.append((p, p))),
    "list in a tuple": _tuple_that_holds_itself,
    "namedtuple in a dict": lambda: closed(
        {"x": torch.zeros(1)}, lambda x, p: x.update(me=Pair(p, p))
    ),
    "tuples within tuples": _tuples_that_hold_each_other,
    "proxy": lambda: closed({"x": torch.zeros(1)}, lambda x, p: x.update(me=_proxy(p))),
    "proxy outside": lambda: _proxy(
        closed({"x": torch.zeros(1)}, lambda x, p: x.update(me=_proxy(p)))
    ),
    "set": _set_that_holds_itself,
    "set outside": lambda: _set_that_holds_itself().right,
    "frozenset": _frozenset_that_holds_itself,
    "frozenset outside": lambda: _frozenset_that_holds_itself().group,
    "set with attributes": lambda: closed(
        CONTAINERS["set subclass with attributes"](torch.zeros(1), 1), _held("me")
    ),
    "frozenset with attributes": lambda: closed(
        CONTAINERS["frozenset subclass with attributes"](torch.zeros(1), 1), _held("me")
    ),
    "parent and children": _family,
}


@pytest.mark.parametrize("name", list(CYCLES))
def test_structures_that_hold_themselves_move(name: str) -> None:
    x = CYCLES[name]()
    before = snapshot(x)

    moved = devicekit.move(x, "meta")

    assert devices_in(moved) == {"meta"}
    assert anatomy(moved) == anatomy(x)
    assert snapshot(x) == before
    assert not {id(part) for part, _ in _containers(moved)} & {id(p) for p, _ in _containers(x)}


@pytest.mark.parametrize("name", list(CYCLES))
def test_structures_that_hold_themselves_stay_where_they_are(name: str) -> None:
    x = CYCLES[name]()
    before = snapshot(x)

    assert devicekit.move(x, "cpu:0") is x
    assert snapshot(x) == before


@pytest.mark.parametrize("name", list(CYCLES))
def test_structures_that_hold_themselves_move_inside_others(name: str) -> None:
    x = {"before": CYCLES[name](), "tuple": (CYCLES[name](),)}

    moved = devicekit.move(x, "meta")

    assert anatomy(moved) == anatomy(x)
    assert devices_in(moved) == {"meta"}


def _containers(x: Any) -> list[Any]:
    return [(s.x, parts) for s, parts in snapshot(x) if not isinstance(s.x, Tensor)]


def test_members_are_found_in_sets_that_hold_themselves() -> None:
    for kind in (Member, EarlyMember):
        x = _frozenset_that_holds_itself(kind)
        object.__setattr__(x, "back", [x.group, (x.group,)])

        assert all(m == "text" or m in m.group for m in devicekit.move(x.group, "meta"))
        moved = devicekit.move(x, "meta")
        assert moved in moved.group
        assert moved.back[1][0] is moved.group


# ---- depth ---------------------------------------------------------------------------------------


LEVELS: dict[str, Callable[[Any, int], Any]] = {
    "list": lambda x, i: [x],
    "dict": lambda x, i: {"x": x},
    "tuple": lambda x, i: (x,),
    "namedtuple": Pair,
    "dataclass": Plain,
    "slots": Slotted,
    "UserDict": lambda x, i: collections.UserDict({"x": x}),
    "proxy": lambda x, i: types.MappingProxyType({"x": x}),
    "mixed": lambda x, i: [[x], {"x": x}, (x,), Plain(x, i), collections.deque([x])][i % 5],
}


def deep(name: str, levels: int = DEEP) -> Any:
    x: Any = torch.zeros(1)
    for i in range(levels):
        x = LEVELS[name](x, i)
    return x


def inner(x: Any) -> Any:
    if isinstance(x, (Plain, Slotted)):
        return x.left
    return x["x"] if isinstance(x, collections.abc.Mapping) else x[0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", list(LEVELS))
def test_structures_of_any_depth_move(name: str) -> None:
    x = deep(name)

    moved = devicekit.move(x, "meta")

    for _ in range(DEEP):
        assert type(moved) is type(x)
        moved, x = inner(moved), inner(x)
    assert moved.device.type == "meta"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", list(LEVELS))
def test_structures_of_any_depth_stay_where_they_are(name: str) -> None:
    x = deep(name)

    assert devicekit.move(x, "cpu") is x
    assert devicekit.move(x, "cpu", skip_keys=["no such key"]) is x


def test_a_failure_of_any_depth_is_a_move_error() -> None:
    class Failing:
        def to(self, device: Any) -> Any:
            msg = "out of order"
            raise ValueError(msg)

    x: Any = Failing()
    for _ in range(DEEP):
        x = [x]

    with pytest.raises(devicekit.MoveError, match="out of order") as caught:
        devicekit.move(x, "meta")
    assert caught.value.path == "batch" + "[0]" * DEEP


@pytest.mark.parametrize("frames_left", [60, 100, 200, 400])
@pytest.mark.parametrize("levels", [10, 50, 150, 1_000])
@pytest.mark.parametrize("name", ["dict", "mixed"])
def test_depth_does_not_depend_on_how_deep_the_caller_is(
    name: str, levels: int, frames_left: int
) -> None:
    x = deep(name, levels)

    for target in ("meta", "cpu"):
        moved = far_down(frames_left, lambda target=target: devicekit.move(x, target))

        assert devices_in(moved) == {target}


def far_down(frames_left: int, fn: Callable[[], Any]) -> Any:
    """Call a function where Python's stack is almost used up; in a thread, to know the depth."""
    results: list[Any] = []

    def descend(left: int) -> None:
        if left:
            descend(left - 1)
        else:
            results.append(fn())

    devicekit.move([torch.zeros(1)], "meta")  # so that nothing is imported down there
    frames = sys.getrecursionlimit() - frames_left
    thread = threading.Thread(target=descend, args=(frames,))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.usefixtures("quick")
def test_wide_structures_take_no_more_time_than_their_size() -> None:
    x = [Slotted(torch.zeros(1), i) for i in range(30_000)]

    moved = devicekit.move(x, "meta")

    assert len(moved) == 30_000
    assert moved[-1].left.device.type == "meta"
