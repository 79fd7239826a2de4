"""What the tests of other libraries expect of their movers holds for `move` as well.

Restated in our own words from what accelerate asserts of `send_to_device`, Lightning of
`move_data_to_device`, skorch of `to_device`, torchtune of `batch_to_device` and ignite of
`convert_tensor`. Where `move` does better on purpose:

- Frozen dataclasses move; Lightning raises for them.
- Dataclass fields without a place in `__init__` move; Lightning leaves them where they are.
- What is there already comes back as the same object; the others build a new container.
- A tensor met twice stays one; the others make two.
- The batch that was given is never changed; torchtune's changes it in place and returns nothing.
- Values that are no tensors pass through; ignite and torchtune raise for numbers and None, and
  skorch for texts.
- An object that holds tensors and cannot be moved is named in a warning, or an error with
  `strict=True`; the others say nothing, or raise.
- An object whose `.to` returns nothing is kept; accelerate and skorch replace it by None.
- No device at all is an error with a way out; ignite and skorch return the batch unmoved.
- `skip_keys` holds at every depth; accelerate's once held at the first only.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from devicekit import InvalidDeviceError, MoveError, move

META = torch.device("meta")


def there(*tensors: Tensor) -> bool:
    return all(tensor.device == META for tensor in tensors)


class TestAccelerate:
    def test_tensors_and_nested_lists_tuples_and_dicts(self) -> None:
        x = torch.randn(5, 2)

        assert there(move(x, META))
        as_tuple = move((x, [x, x], 1), META)
        assert isinstance(as_tuple, tuple)
        assert there(as_tuple[0], *as_tuple[1])
        assert as_tuple[2] == 1
        as_dict = move({"a": x, "b": [x, x], "c": 1}, META)
        assert there(as_dict["a"], *as_dict["b"])
        assert as_dict["c"] == 1

    def test_named_tuples_and_their_subclasses(self) -> None:
        class Both(NamedTuple):
            a: Any
            b: Any
            c: Any

        moved = move(Both(a=torch.ones(2), b=[torch.ones(2)], c=1), META)

        assert type(moved) is Both
        assert there(moved.a, *moved.b)
        assert moved.c == 1

    def test_mappings_keep_their_type(self) -> None:
        x = torch.ones(2)

        moved = move(collections.UserDict({"a": x, "b": [x], "c": 1}), META)

        assert isinstance(moved, collections.UserDict)
        assert there(moved["a"], *moved["b"])

    def test_default_dicts_keep_their_factory(self) -> None:
        moved = move(collections.defaultdict(list, a=torch.ones(2)), META)

        assert moved["new"] == []
        assert there(moved["a"])

    def test_keys_can_be_skipped(self) -> None:
        batch = {"x": torch.ones(2), "stay": torch.ones(2), "sub": {"stay": torch.ones(2)}}

        moved = move(batch, META, skip_keys=["stay"])

        assert there(moved["x"])
        assert moved["stay"].device.type == moved["sub"]["stay"].device.type == "cpu"

    def test_objects_move_by_their_own_to_without_non_blocking(self) -> None:
        class Features:
            def __init__(self, x: Tensor) -> None:
                self.x = x

            def to(self, device: torch.device) -> Features:
                return Features(self.x.to(device))

        moved = move({"f": Features(torch.ones(2))}, META, non_blocking=True)

        assert there(moved["f"].x)

    def test_a_type_error_inside_a_to_is_raised_and_not_tried_again(self) -> None:
        calls = []

        class Faulty:
            def to(self, device: torch.device, non_blocking: bool = False) -> Any:
                calls.append(device)
                msg = "a fault of its own"
                raise TypeError(msg)

        with pytest.raises(MoveError, match="a fault of its own"):
            move([Faulty()], META, non_blocking=True)
        assert len(calls) == 1


class TestLightning:
    @dataclasses.dataclass
    class Features:
        data: Tensor
        lengths: list[Any]
        derived: Any = dataclasses.field(init=False, default=None)

    def test_dataclasses_move_in_structures(self) -> None:
        features = self.Features(torch.ones(2), [torch.ones(1), "text"])
        features.derived = {"mask": torch.ones(2)}

        moved = move({"features": [features, 5]}, META)["features"][0]

        assert type(moved) is self.Features
        assert there(moved.data, moved.lengths[0], moved.derived["mask"])
        assert features.data.device.type == "cpu"

    def test_frozen_dataclasses_move(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Frozen:
            x: Tensor

        assert there(move(Frozen(torch.ones(2)), META).x)

    def test_whatever_has_a_to_is_sent_by_it(self) -> None:
        class Custom:
            def __init__(self) -> None:
                self.device = torch.device("cpu")

            def to(self, *args: Any, **_options: Any) -> Custom:
                self.device = args[0]
                return self

        assert move([Custom()], META)[0].device == META

    def test_a_to_that_returns_nothing_is_no_loss(self) -> None:
        class InPlace:
            def __init__(self, x: Tensor) -> None:
                self.x = x

            def to(self, device: torch.device) -> None:
                self.x = self.x.to(device)

        moved = move({"custom": InPlace(torch.ones(2))}, META)

        assert there(moved["custom"].x)

    def test_texts_numbers_and_none_pass(self) -> None:
        batch = {"text": "a", "number": 1.5, "none": None, "bytes": b"x"}

        assert move(batch, META) is batch


class TestSkorch:
    def test_packed_sequences(self) -> None:
        packed = pack_padded_sequence(torch.ones(2, 3, 1), [3, 2], batch_first=True)

        moved = move(packed, META)

        assert isinstance(moved, PackedSequence)
        assert there(moved.data)
        assert moved.batch_sizes.device.type == "cpu"

    def test_modules_are_returned(self) -> None:
        module = nn.Linear(2, 2)

        assert move(module, META) is module
        assert there(module.weight)

    def test_tuples_lists_and_nested_mappings(self) -> None:
        moved = move(({"x": torch.ones(1)}, [torch.ones(1), (torch.ones(1),)]), META)

        assert isinstance(moved, tuple)
        assert there(moved[0]["x"], moved[1][0], moved[1][1][0])

    def test_no_device_is_refused(self) -> None:
        with pytest.raises(InvalidDeviceError, match="Leave it out"):
            move(torch.ones(1), None)  # type: ignore[call-overload]


class TestTorchtune:
    def test_a_batch_of_dicts_moves_and_the_given_one_stays(self) -> None:
        batch = {"a": torch.ones(1), "sub": {"b": torch.ones(1)}}

        moved = move(batch, META)

        assert there(moved["a"], moved["sub"]["b"])
        assert batch["a"].device.type == batch["sub"]["b"].device.type == "cpu"

    def test_what_it_does_not_know_is_named(self) -> None:
        class Opaque:
            def __init__(self) -> None:
                self.x = torch.ones(1)

        batch = {"a": torch.ones(1), "bad": Opaque()}

        with pytest.raises(MoveError, match=r"batch\['bad'\] \(Opaque\) holds tensors"):
            move(batch, META, strict=True)
        with pytest.warns(UserWarning, match=r"batch\['bad'\] \(Opaque\) holds tensors"):
            moved = move(batch, META)
        assert there(moved["a"])


class TestIgnite:
    def test_lists_and_tuples_of_tensors_and_texts(self) -> None:
        x = torch.ones(1)

        for batch in ([x, x], (x, x), {"a": x, "b": x}, [x, "text"], (x, [x], {"k": (x,)})):
            moved = move(batch, META)

            assert type(moved) is type(batch)

    def test_named_tuples_keep_their_names(self) -> None:
        Pair = collections.namedtuple("Pair", "left right")

        moved = move(Pair(torch.ones(1), torch.ones(2)), META)

        assert type(moved) is Pair
        assert there(moved.left, moved.right)

    def test_texts_come_back_as_they_are(self) -> None:
        assert move("text", META) == "text"
        assert move(b"text", META) == b"text"

    def test_numbers_pass_too(self) -> None:
        assert move([1, 2.5, None], META) == [1, 2.5, None]


def test_what_is_there_is_not_built_again() -> None:
    x = torch.ones(2)
    batch = {"a": x, "b": [x, {"c": (x, 1)}]}

    assert move(batch, "cpu") is batch
    moved = move(batch, META)
    assert moved["a"] is moved["b"][0] is moved["b"][1]["c"][0]
