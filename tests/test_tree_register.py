"""register(): types that only their owner knows how to rebuild."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from anatomy import snapshot
from torch import Tensor
from work import at_most

import devicekit
from devicekit._tree import kinds


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    """What a test registers does not outlive it."""
    before = dict(kinds._REGISTERED)
    yield
    kinds._REGISTERED.clear()
    kinds._REGISTERED.update(before)
    devicekit._tree.forget_types()


class Graph:
    """Something with an `__init__` of its own that checks what it is given."""

    def __init__(self, nodes: Any, edges: Any) -> None:
        self.nodes = nodes
        self.edges = edges
        self.size = len(nodes)


class SubGraph(Graph):
    pass


def graph(g: Graph, fn: Callable[[Any], Any]) -> Graph:
    return type(g)(fn(g.nodes), fn(g.edges))


def test_a_registered_type_moves_and_its_subclasses_too() -> None:
    devicekit.register(Graph, graph)
    x = SubGraph(torch.zeros(2), [torch.zeros(1), {"x": torch.zeros(3)}])
    before = snapshot(x)

    moved = devicekit.move({"g": x}, "meta")["g"]

    assert type(moved) is SubGraph
    assert moved.size == 2
    assert moved.nodes.device.type == moved.edges[1]["x"].device.type == "meta"
    assert snapshot(x) == before


def test_what_is_nearest_among_the_bases_counts() -> None:
    devicekit.register(SubGraph, lambda g, fn: SubGraph(fn(g.nodes), "of the subclass"))
    devicekit.register(Graph, lambda g, fn: Graph(fn(g.nodes), "of the base"))

    base, sub = devicekit.move([Graph(torch.zeros(1), 0), SubGraph(torch.zeros(1), 0)], "meta")

    assert (base.edges, sub.edges) == ("of the base", "of the subclass")


def test_what_was_registered_last_counts_at_once() -> None:
    x = [Graph(torch.zeros(1), 0)]
    with pytest.warns(UserWarning, match=r"batch\[0\] \(Graph\)"):
        devicekit.move(x, "meta")

    for name in ("first", "second"):
        devicekit.register(Graph, lambda g, fn, name=name: Graph(fn(g.nodes), name))
        assert devicekit.move(x, "meta")[0].edges == name


def test_a_new_object_where_nothing_moves_is_thrown_away() -> None:
    devicekit.register(Graph, graph)
    x = Graph(torch.zeros(1), [1])

    assert devicekit.move(x, "cpu:0") is x
    assert devicekit.move([x, torch.zeros(1)], "meta", skip_keys=["nodes"])[0] is not x


@pytest.mark.parametrize("base", [dict, list, tuple, Tensor], ids=lambda base: base.__name__)
def test_a_registered_type_takes_precedence_over_what_it_is(base: Any) -> None:
    class Own(base):  # type: ignore[misc]
        moved_by = "nobody"

    def apply(x: Any, fn: Callable[[Any], Any]) -> Any:
        new = Own()
        new.moved_by = fn(torch.zeros(1)).device.type
        return new

    devicekit.register(Own, apply)

    assert devicekit.move({"x": Own()}, "meta")["x"].moved_by == "meta"


def test_a_registered_dataclass_and_one_with_its_own_to_go_by_what_was_registered() -> None:
    @dataclass
    class Own:
        x: Any

        def to(self, device: Any) -> Any:
            raise AssertionError

    devicekit.register(Own, lambda own, fn: Own(("registered", fn(own.x))))

    name, x = devicekit.move(Own(torch.zeros(1)), "meta").x

    assert (name, x.device.type) == ("registered", "meta")


# ---- parts ---------------------------------------------------------------------------------------


def test_parts_that_are_shared_stay_shared() -> None:
    devicekit.register(Graph, graph)
    tensor, row = torch.zeros(1), [torch.zeros(2)]
    shared = Graph(tensor, row)

    g, again, t, r = devicekit.move([shared, shared, tensor, row], "meta")

    assert g is again
    assert g.nodes is t
    assert g.edges is r


@pytest.mark.parametrize("options", [{}, {"skip_keys": ["no such key"]}], ids=["fast", "thorough"])
def test_parts_that_are_made_for_the_call_do_not_mix(options: Any) -> None:
    """Their ids are used again as soon as they are gone."""

    class Rows:
        def __init__(self, rows: list[list[int]]) -> None:
            self.rows = rows

    def apply(x: Rows, fn: Callable[[Any], Any]) -> Rows:
        made = (fn({"row": [torch.tensor(row)]})["row"][0] for row in x.rows)
        return Rows([(t.device.type, t.numel()) for t in made])

    devicekit.register(Rows, apply)
    batch = [Rows([[0] * n for n in range(k, k + 20)]) for k in range(50)]

    moved = devicekit.move(batch, "meta", **options)

    for k, rows in enumerate(moved):
        assert rows.rows == [("meta", n) for n in range(k, k + 20)]


def test_keys_are_skipped_inside_parts() -> None:
    devicekit.register(Graph, graph)
    x = Graph(torch.zeros(1), {"keep": torch.zeros(1), "x": [{"keep": torch.zeros(1)}]})

    moved = devicekit.move(x, "meta", skip_keys="keep")

    assert moved.nodes.device.type == "meta"
    assert moved.edges["keep"] is x.edges["keep"]
    assert moved.edges["x"][0]["keep"].device.type == "cpu"


# ---- cycles and depth ----------------------------------------------------------------------------


@pytest.mark.parametrize("outside", ["container", "registered"])
def test_registered_types_in_cycles_move(outside: str) -> None:
    devicekit.register(Graph, graph)
    container: dict[str, Any] = {"x": torch.zeros(2)}
    container["g"] = Graph([torch.zeros(1)], [container])

    if outside == "container":
        moved = devicekit.move(container, "meta")
    else:
        moved = devicekit.move(container["g"], "meta").edges[0]

    assert moved["g"].edges[0] is moved
    assert moved["x"].device.type == moved["g"].nodes[0].device.type == "meta"
    assert devicekit.move(container, "cpu") is container


class Node:
    def __init__(self, x: Any, next: Any) -> None:
        self.x = x
        self.next = next


@pytest.mark.parametrize("temporary", [False, True], ids=["its own parts", "parts made anew"])
def test_a_registered_object_that_is_its_own_part_is_refused(temporary: bool) -> None:
    def apply(n: Node, fn: Callable[[Any], Any]) -> Node:
        return Node(fn(n.x), fn([n.next])[0] if temporary else fn(n.next))

    devicekit.register(Node, apply)
    x = Node(torch.zeros(1), None)
    x.next = x

    with pytest.raises(devicekit.MoveError, match=r"holds itself") as caught, at_most(calls=10_000):
        devicekit.move({"g": x}, "meta")
    assert caught.value.path is not None
    assert caught.value.path.startswith("batch['g']")


def test_registered_types_of_any_depth_move() -> None:
    devicekit.register(Node, lambda n, fn: Node(fn(n.x), fn(n.next)))
    x = None
    for _ in range(20_000):
        x = Node(torch.zeros(1), x)

    with at_most(calls=5_000_000):
        moved = devicekit.move(x, "meta")
        assert devicekit.move(x, "cpu") is x

    for _ in range(20_000):
        assert moved.x.device.type == "meta"
        moved = moved.next


def test_registered_types_that_share_at_every_level_are_visited_once() -> None:
    devicekit.register(Node, lambda n, fn: Node(fn(n.x), fn(n.next)))
    x: Any = torch.zeros(1)
    for _ in range(100):
        x = Node(x, x)

    with at_most(calls=500_000):
        moved = devicekit.move(x, "meta")
        assert devicekit.move(x, "cpu") is x

    assert moved.x is moved.next


# ---- what can go wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"skip_keys": ["no such key"]}], ids=["fast", "thorough"])
def test_what_apply_raises_is_the_cause_of_a_move_error(options: Any) -> None:
    def apply(g: Graph, fn: Callable[[Any], Any]) -> Graph:
        msg = "cannot be taken apart"
        raise LookupError(msg)

    devicekit.register(Graph, apply)

    with pytest.raises(devicekit.MoveError, match=r"cannot be taken apart") as caught:
        devicekit.move({"x": [Graph([1], 0)]}, "meta", **options)
    assert caught.value.path == "batch['x'][0]"
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_part_that_fails_is_named() -> None:
    class Failing:
        def to(self, device: Any) -> Any:
            raise ValueError("out of order")  # noqa: EM101

    devicekit.register(Graph, graph)

    with pytest.raises(devicekit.MoveError, match="out of order") as caught:
        devicekit.move({"g": Graph([1], {"bad": Failing()})}, "meta")
    assert caught.value.path == "batch['g'][1]['bad']"


@pytest.mark.parametrize("options", [{}, {"skip_keys": ["no such key"]}], ids=["fast", "thorough"])
def test_apply_must_return_something(options: Any) -> None:
    devicekit.register(Graph, lambda g, fn: fn(g.nodes) and None)

    with pytest.raises(devicekit.MoveError, match="registered for Graph returned None"):
        devicekit.move([Graph([torch.zeros(1)], 0)], "meta", **options)


@pytest.mark.parametrize(
    ("cls", "apply", "message"),
    [
        (torch.zeros(1), lambda x, fn: x, "expected a class, such as Tensor"),
        ("Graph", lambda x, fn: x, "expected a class, such as str"),
        (
            dict,
            None,
            r"register\(dict, \.\.\.\) was given None: expected a function apply\(x, fn\)",
        ),
    ],
)
def test_register_refuses_what_is_no_class_and_no_function(
    cls: Any, apply: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        devicekit.register(cls, apply)

    assert devicekit.move({"x": "text"}, "meta") == {"x": "text"}
