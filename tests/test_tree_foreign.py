"""move() on objects that have a `.to` of their own, or look as if they had."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
from typing import Any

import pytest
import torch
from anatomy import anatomy, snapshot

import devicekit

WAYS = {"fast": {}, "thorough": {"skip_keys": ["no such key"]}}


@pytest.fixture(params=list(WAYS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


# ---- objects with a `.to` of their own -----------------------------------------------------------


class Holder:
    """Its `.to` takes a device only and returns a new object."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: Any) -> Any:
        return type(self)(self.x.to(device))


class Flagged(Holder):
    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return type(self)(self.x.to(device, non_blocking=non_blocking))


class Anything(Holder):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        return type(self)(self.x.to(*args, **kwargs))


class InPlace(Holder):
    def to(self, device: Any) -> None:  # type: ignore[override]
        self.x = self.x.to(device)


class InPlaceAndBack(Holder):
    def to(self, device: Any) -> Any:
        self.x = self.x.to(device)
        return self


class InPlaceInside(Holder):
    def to(self, device: Any) -> Any:
        for row in self.x["rows"]:
            row["x"] = row["x"].to(device)
        return self


class InPlaceInSlots:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def to(self, device: Any) -> None:
        self.x = self.x.to(device)


@pytest.mark.parametrize(
    "cls", [Holder, Flagged, Anything, InPlace, InPlaceAndBack, InPlaceInSlots]
)
@pytest.mark.parametrize("non_blocking", [None, True, False])
def test_objects_move_by_their_own_to(cls: Any, non_blocking: bool | None, options: Any) -> None:
    x = cls(torch.zeros(1))
    before = x.x

    moved = devicekit.move({"x": [x]}, "meta", non_blocking=non_blocking, **options)["x"][0]

    assert type(moved) is cls
    assert moved is not x
    assert moved.x.device.type == "meta"
    assert x.x is before
    assert devicekit.move([x], "cpu:0", **options)[0] is x


def test_what_an_object_changes_inside_itself_does_not_change_the_input() -> None:
    x = InPlaceInside({"rows": [{"x": torch.zeros(1)}], "n": 1})
    before = snapshot(x.x)

    moved = devicekit.move(x, "meta")

    assert moved.x["rows"][0]["x"].device.type == "meta"
    assert snapshot(x.x) == before


def test_a_to_without_a_signature_is_called_with_a_device_only() -> None:
    calls: list[Any] = []

    class Partial:
        to = functools.partial(lambda x, device: calls.append(device))

    devicekit.move([Partial()], "meta", non_blocking=True)

    assert calls == [torch.device("meta")]


def test_a_to_that_takes_the_device_by_name_only_is_called() -> None:
    class Stored:  # as torch's own storages have it
        device = torch.device("cpu")

        def to(self, *, device: torch.device, non_blocking: bool = False) -> Stored:
            moved = Stored()
            moved.device = device
            return moved

    assert devicekit.move({"s": Stored()}, "meta")["s"].device.type == "meta"


def test_an_object_is_moved_once_however_often_it_is_met(options: Any) -> None:
    calls = []

    class Counting(Holder):
        def to(self, device: Any) -> Any:
            calls.append(device)
            return super().to(device)

    x = Counting(torch.zeros(1))

    a, (b, c) = devicekit.move([x, (x, {"x": x})], "meta", **options)

    assert a is b is c["x"]
    assert calls == [torch.device("meta")]


@pytest.mark.parametrize("options", [{}, {"non_blocking": True}, {"skip_keys": "x"}])
def test_a_type_error_of_an_object_comes_through_after_one_call(options: Any) -> None:
    calls = []

    class Own:
        def to(self, device: Any, non_blocking: bool = False) -> Any:
            calls.append(device)
            return len(3)  # type: ignore[arg-type]

    with pytest.raises(devicekit.MoveError, match=r"batch\['o'\].*has no len") as caught:
        devicekit.move({"o": Own()}, "meta", **options)
    assert isinstance(caught.value.__cause__, TypeError)
    assert len(calls) == 1


class Quantity:
    """Its `.to` means something else."""

    def to(self, unit: str) -> Any:
        if unit not in ("m", "km"):
            msg = f"no such unit: {unit}"
            raise ValueError(msg)
        return self


class Mail:
    """A field of that name."""

    to = "somebody"


class ToClass:
    def to(self, device: Any) -> Any:
        raise AssertionError


def test_a_to_that_means_something_else_is_named() -> None:
    with pytest.raises(devicekit.MoveError, match=r"no such unit: meta") as caught:
        devicekit.move({"n": {"length": (1, Quantity())}}, "meta")
    assert caught.value.path == "batch['n']['length'][1]"
    assert caught.value.target == torch.device("meta")


@dataclasses.dataclass
class Letter:
    to: Any = None


def _with_to() -> None:
    """A function with an attribute."""


_with_to.to = ToClass.to  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "x", [Mail(), ToClass, _with_to, Letter, Letter("somebody"), ToClass().to, Holder]
)
def test_what_only_looks_like_a_to_is_not_called(x: Any, options: Any) -> None:
    assert devicekit.move([x, torch.zeros(1)], "meta", **options)[0] is x


def test_a_field_called_to_moves() -> None:
    assert devicekit.move(Letter(torch.zeros(1)), "meta").to.device.type == "meta"
    named = collections.namedtuple("named", "to")
    assert devicekit.move(named(torch.zeros(1)), "meta").to.device.type == "meta"


class Proxy:
    """It gives whatever it is asked for from what it wraps."""

    def __init__(self, wrapped: Any) -> None:
        self.__dict__["wrapped"] = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


def test_a_proxy_is_not_taken_for_what_it_wraps(options: Any) -> None:
    """Its `.to` would return what is wrapped, without the proxy."""
    x = Proxy(torch.zeros(1))

    with pytest.warns(UserWarning, match=r"batch\['p'\] \(Proxy\)"):
        moved = devicekit.move({"p": x}, "meta", **options)
    assert moved["p"] is x


# ---- the batches of Hugging Face, as small as can be ---------------------------------------------


class Encoding(collections.UserDict[str, Any]):
    """As `BatchEncoding`: its `.to` changes it in place."""

    def __init__(self, data: dict[str, Any], encodings: Any) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError from None

    def to(self, device: Any) -> Any:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


@dataclasses.dataclass
class Output(collections.OrderedDict[Any, Any]):
    """As `ModelOutput`: each field is an item too, and None is no item."""

    loss: Any = None
    logits: Any = None
    states: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def test_an_encoding_of_hugging_face_is_not_changed_in_place(options: Any) -> None:
    x = Encoding({"ids": torch.zeros(1), "labels": [torch.zeros(2)]}, encodings=["kept"])
    parts = [x, x.data, x._encodings]
    before = snapshot(parts)

    moved = devicekit.move(x, "meta", **options)

    assert type(moved) is Encoding
    assert moved["ids"].device.type == moved.labels[0].device.type == "meta"
    assert moved._encodings is x._encodings
    assert snapshot(parts) == before
    assert devicekit.move(x, "cpu", **options) is x


def test_an_output_of_hugging_face_moves_in_both_its_natures(options: Any) -> None:
    x = Output(logits=torch.zeros(1), states=(torch.zeros(2), torch.zeros(3)))

    moved = devicekit.move(x, "meta", **options)

    assert anatomy(moved) == anatomy(x)
    assert moved["logits"] is moved.logits
    assert moved["states"] is moved.states
    assert moved.loss is None
    assert list(moved) == ["logits", "states"]
    assert moved.states[1].device.type == "meta"


# ---- what an object writes into ------------------------------------------------------------------


class Inner:
    """Holds a tensor, and knows nothing of devices."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Slots:
    __slots__ = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows


class Writes:
    """Its `.to` writes into what it holds, however deep."""

    def __init__(self, held: Any, write: Any) -> None:
        self.held = held
        self.write = write

    def to(self, device: Any) -> Any:
        self.write(self.held, device)
        return self


def write_object(held: Any, device: Any) -> None:
    held.x = held.x.to(device)


def write_list(held: Any, device: Any) -> None:
    held[:] = [x.to(device) for x in held]


def in_tuple(held: Any, device: Any) -> None:
    write_list(held[1], device)


def in_slots(held: Any, device: Any) -> None:
    write_list(held.rows, device)


def in_object_of_object(held: Any, device: Any) -> None:
    write_object(held[0]["a"].x, device)


def by_their_own_to(held: Any, device: Any) -> None:
    for part in held:
        part.to(device)


def two_names(held: Any, device: Any) -> None:
    write_object(held["a"], device)
    assert held["b"] is held["a"]


SHARED = Inner(torch.zeros(1))

WRITTEN = {
    "an object": (lambda: Inner(torch.zeros(1)), write_object),
    "a list": (lambda: [torch.zeros(1)], write_list),
    "a list in a tuple": (lambda: (1, [torch.zeros(1)]), in_tuple),
    "a list in slots": (lambda: Slots([torch.zeros(1)]), in_slots),
    "an object in an object": (lambda: [{"a": Inner(Inner(torch.zeros(1)))}], in_object_of_object),
    "objects that write into themselves": (lambda: [InPlace(torch.zeros(1))], by_their_own_to),
    "an object with two names": (lambda: {"a": SHARED, "b": SHARED}, two_names),
    "a dict of Hugging Face's kind": (
        lambda: collections.UserDict(x=torch.zeros(1)),
        lambda held, device: held.update(x=held["x"].to(device)),
    ),
}


@pytest.mark.parametrize(("make", "write"), WRITTEN.values(), ids=WRITTEN.keys())
def test_what_a_to_writes_into_is_not_the_callers(make: Any, write: Any) -> None:
    x = Writes(make(), write)
    before = snapshot(x.held)

    moved = devicekit.move([x], "meta")[0]

    assert snapshot(x.held) == before
    assert devicekit.device_of(moved) == torch.device("meta")
    assert type(moved.held) is type(x.held)


@pytest.mark.parametrize(("make", "write"), WRITTEN.values(), ids=WRITTEN.keys())
def test_a_to_that_fails_after_it_has_written_changes_nothing(make: Any, write: Any) -> None:
    def fail(held: Any, device: Any) -> None:
        write(held, device)
        raise RuntimeError("half way")  # noqa: EM101

    x = Writes(make(), fail)
    before = snapshot(x.held)

    with pytest.raises(devicekit.MoveError, match="half way"):
        devicekit.move({"x": x}, "meta")

    assert snapshot(x.held) == before


def test_what_holds_no_tensors_is_shared_with_the_copy() -> None:
    settings = Inner("a text")
    x = Writes([Inner(torch.zeros(1)), settings], lambda held, d: write_object(held[0], d))

    moved = devicekit.move(x, "meta")

    assert moved.held[1] is settings


# ---- single values -------------------------------------------------------------------------------


class Unit(enum.Enum):
    METER = 1

    def to(self, other: Any) -> Any:
        raise AssertionError


class Length(float):
    def to(self, unit: str) -> Any:
        raise AssertionError


class Moment(datetime.datetime):
    def to(self, zone: str) -> Any:
        raise AssertionError


class Name(str):
    def to(self, language: str) -> Any:
        raise AssertionError


@pytest.mark.parametrize("x", [Unit.METER, Length(1), Moment.min, Name("name")], ids=repr)
def test_a_single_value_with_a_to_passes_through(x: Any, options: Any) -> None:
    moved = devicekit.move({"t": torch.zeros(1), "x": [x]}, "meta", **options)

    assert moved["x"][0] is x
