"""`move` under `torch.compile`: no graph break, no recompile, no device that does not exist."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from anatomy import anatomy
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import pack_sequence

import devicekit
from devicekit._move.traced import move_traced

Row = collections.namedtuple("Row", "image mask")


@dataclasses.dataclass
class Sample:
    image: Any
    label: int = 3


@dataclasses.dataclass(frozen=True)
class FrozenSample:
    image: Any
    label: int = 3


class Tagged(dict[str, Any]):
    """Its `__init__` takes something else than the items."""

    def __init__(self, tag: str, **items: Any) -> None:
        super().__init__(items)
        self.tag = tag


class TaggedInOrder(collections.OrderedDict[str, Any]):
    """As an output of Hugging Face: each item is an attribute as well."""

    def __init__(self, tag: str, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items, tag=tag)


class TaggedUserDict(collections.UserDict[str, Any]):
    def __init__(self, tag: str, **items: Any) -> None:
        super().__init__(items)
        self.tag = tag


class TaggedDefault(collections.defaultdict[str, Any]):
    def __init__(self, tag: str, **items: Any) -> None:
        super().__init__(list, items)
        self.tag = tag


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(devicekit.move(self, batch)["x"])


def batches() -> dict[str, Any]:
    x = torch.ones(2)
    return {
        "tensor": x,
        "parameter": nn.Parameter(x),
        "dict": {"a": x, "b": x, "name": "s", "none": None},
        "ordered": collections.OrderedDict(a=x),
        "defaultdict": collections.defaultdict(list, a=x),
        "userdict": collections.UserDict({"a": x}),
        "list": [x, x],
        "tuple": (x, 1, "s"),
        "namedtuple": Row(x, x),
        "dataclass": Sample(x),
        "frozen": FrozenSample(x),
        "nested": {"rows": [Row(x, (x, {"deep": x}))]},
        "packed": pack_sequence([x, x]),
        "labels": {"labels": list(range(100)), "x": x},
    }


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="eager")


@pytest.mark.parametrize("target", [torch.device("cpu"), "cpu", "meta"], ids=repr)
@pytest.mark.parametrize("kind", batches())
def test_move_compiles_without_a_graph_break(kind: str, target: Any) -> None:
    batch = batches()[kind]

    moved = compiled(lambda x: devicekit.move(x, target))(batch)

    assert type(moved) is type(devicekit.move(batch, target))
    assert devicekit.device_of(moved) == torch.device(target)


@pytest.mark.parametrize("target", ["cpu", "meta"])
@pytest.mark.parametrize("kind", batches())
def test_what_dynamo_traces_is_what_move_does(kind: str, target: str) -> None:
    batch = batches()[kind]

    traced, moved = move_traced(devicekit.move, (batch, target)), devicekit.move(batch, target)

    assert type(traced) is type(moved)
    assert devicekit.device_of(traced) == devicekit.device_of(moved)


def test_what_dynamo_traces_takes_a_model_or_nothing_for_a_device() -> None:
    batch = {"x": torch.ones(2)}
    buffers = nn.BatchNorm1d(2, affine=False)

    assert move_traced(devicekit.move, (nn.Linear(1, 1), batch))["x"] is batch["x"]
    assert move_traced(devicekit.move, (buffers, batch))["x"] is batch["x"]
    assert move_traced(devicekit.move, (batch,))["x"].device == devicekit.auto()
    assert move_traced(devicekit.move, (nn.Linear(1, 1), "cpu")).weight.device.type == "cpu"
    with pytest.raises(devicekit.NoDeviceError, match="The model holds no tensor"):
        move_traced(devicekit.move, (nn.ReLU(), batch))


def with_attribute(x: Any) -> Any:
    x.tag = "mine"
    return x


EXTRAS = {
    "dict": lambda x: Tagged("mine", x=x),
    "ordered dict": lambda x: TaggedInOrder("mine", x=x),
    "user dict": lambda x: TaggedUserDict("mine", x=x),
    "dataclass": lambda x: with_attribute(Sample(x)),
}


@pytest.mark.parametrize("make", EXTRAS.values(), ids=EXTRAS.keys())
def test_what_a_container_carries_beside_its_items_comes_along(make: Any) -> None:
    moved = compiled(lambda x: devicekit.move(x, "meta"))(make(torch.ones(1)))

    assert moved.tag == "mine"
    assert anatomy(moved) == anatomy(devicekit.move(make(torch.ones(1)), "meta"))


def test_subclasses_of_defaultdict_and_registered_types_keep_what_they_are() -> None:
    class Pair(Sample):
        pass

    devicekit.register(Pair, lambda x, fn: Pair(fn(x.image), x.label + 1))
    function = torch.compile(lambda x: devicekit.move(x, "meta"), backend="eager")

    tagged, pair = function([TaggedDefault("mine", x=torch.ones(1)), Pair(torch.ones(1))])

    assert (tagged.tag, tagged.default_factory, tagged["x"].device.type) == ("mine", list, "meta")
    assert (pair.label, pair.image.device.type) == (4, "meta")


@dataclasses.dataclass
class Doubling:
    x: Any
    kept: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.x = self.x * 2


def test_what_tracing_would_change_is_moved_outside_the_graph() -> None:
    doubling = Doubling(torch.ones(1))
    doubling.kept = torch.ones(1)
    batch = [collections.deque([torch.ones(1)], 3), doubling]

    queue, moved = torch.compile(lambda x: devicekit.move(x, "meta"), backend="eager")(batch)
    same = torch.compile(lambda x: devicekit.move(x, "cpu"), backend="eager")(doubling)

    assert (type(queue), queue.maxlen, queue[0].device.type) == (collections.deque, 3, "meta")
    assert moved.kept.device.type == "meta"
    assert same.x.item() == 2


def test_options_are_honoured_in_a_compiled_function() -> None:
    function = torch.compile(
        lambda x: devicekit.move(x, "meta", skip_keys=["ids"]), backend="eager"
    )

    moved = function({"x": torch.ones(1), "ids": torch.ones(1)})

    assert (moved["x"].device.type, moved["ids"].device.type) == ("meta", "cpu")


def test_move_to_a_model_compiles_inside_its_forward() -> None:
    model = Model()

    result = compiled(model)({"x": torch.ones(1, 2)})

    assert torch.equal(result, model({"x": torch.ones(1, 2)}))


def test_move_to_a_model_of_buffers_compiles() -> None:
    model = nn.ReLU()
    model.register_buffer("scale", torch.ones(1))

    moved = compiled(lambda x: devicekit.move(model, x))([torch.ones(2)])

    assert moved[0].device == torch.device("cpu")


def test_move_to_the_automatic_choice_compiles() -> None:
    moved = compiled(devicekit.move)(torch.ones(2))

    assert moved.device == devicekit.auto()


def test_a_missing_device_is_refused_when_it_is_compiled() -> None:
    function = compiled(lambda x: devicekit.move(x, "xpu:9"))

    with pytest.raises(Exception, match="'xpu:9' is not available"):
        function(torch.ones(2))


def test_a_new_container_type_recompiles_nothing() -> None:
    model = compiled(Model())
    model({"x": torch.ones(1, 2)})
    graphs = counters["stats"]["unique_graphs"]

    @dataclasses.dataclass
    class MetLater:
        x: Any

    devicekit.move(MetLater(torch.ones(1)), "cpu")
    model({"x": torch.ones(1, 2)})

    assert counters["stats"]["unique_graphs"] == graphs
