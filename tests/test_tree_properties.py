"""What holds of move() and walk() for every structure, by generated ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from anatomy import anatomy, snapshot, tensors_in
from containers import CALLS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import structures
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

import devicekit
from devicekit._tree import walk

OPTIONS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"skip_keys": ["no such key"]}, {"non_blocking": True}, {"strict": True}]
)
few = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def data_in(x: Any) -> list[Tensor]:
    """Return the tensors that move: the batch sizes of a `PackedSequence` do not."""
    sizes = {id(p.batch_sizes) for _, p in walk(x) if isinstance(p, PackedSequence)}
    return [tensor for tensor in tensors_in(x) if id(tensor) not in sizes]


@given(structures(devices=("cpu",)), OPTIONS)
@few
def test_structure_and_types_and_sharing_are_kept(x: Any, options: dict[str, Any]) -> None:
    moved = devicekit.move(x, "meta", **options)

    assert anatomy(moved) == anatomy(x)
    assert {tensor.device.type for tensor in data_in(moved)} <= {"meta"}


@given(structures(), OPTIONS)
@few
def test_what_is_there_already_stays_the_same_object(x: Any, options: dict[str, Any]) -> None:
    moved = devicekit.move(x, "meta", **options)

    there = {id(tensor) for tensor in data_in(x) if tensor.device.type == "meta"}
    assert there <= {id(tensor) for tensor in tensors_in(moved)}
    assert anatomy(moved) == anatomy(x)


@given(structures(), OPTIONS)
@few
def test_moving_twice_is_moving_once(x: Any, options: dict[str, Any]) -> None:
    moved = devicekit.move(x, "meta", **options)

    assert devicekit.move(moved, "meta", **options) is moved


@given(structures(devices=("cpu",)), OPTIONS, st.sampled_from(["cpu", "cpu:0"]))
@few
def test_where_nothing_moves_the_same_object_is_returned(
    x: Any, options: dict[str, Any], here: str
) -> None:
    before = snapshot(x)

    assert devicekit.move(x, here, **options) is x
    assert snapshot(x) == before


@given(structures(), OPTIONS)
@few
def test_the_input_is_not_changed_and_its_code_does_not_run(
    x: Any, options: dict[str, Any]
) -> None:
    before = snapshot(x)
    CALLS.clear()

    devicekit.move(x, "meta", **options)

    assert CALLS == []
    assert snapshot(x) == before


@given(structures())
@few
def test_both_ways_through_a_structure_give_the_same(x: Any) -> None:
    fast = devicekit.move(x, "meta")
    thorough = devicekit.move(x, "meta", skip_keys=["no such key"])

    assert anatomy(fast) == anatomy(thorough)
    assert (fast is x) == (thorough is x)


@given(structures())
@few
def test_walk_yields_every_tensor_once(x: Any) -> None:
    found = [leaf for _, leaf in walk(x, opaque=True)]

    assert all(type(leaf) is Tensor for leaf in found)
    assert len({id(leaf) for leaf in found}) == len(found)
    assert {id(leaf) for leaf in found} == {id(tensor) for tensor in tensors_in(x)}


@given(structures())
@few
def test_walk_yields_what_moves_as_a_whole_and_nothing_in_it(x: Any) -> None:
    found = [leaf for _, leaf in walk(x)]
    packed = [leaf for leaf in found if isinstance(leaf, PackedSequence)]
    inside = {id(part) for whole in packed for part in whole}

    assert all(type(leaf) in (Tensor, PackedSequence) for leaf in found)
    assert {id(leaf) for leaf in found} - set(map(id, packed)) == {
        id(tensor) for tensor in tensors_in(x)
    } - inside


@given(structures())
@few
def test_paths_are_all_different(x: Any) -> None:
    paths = [path for path, _ in walk(x, "batch", opaque=True)]

    assert len(set(paths)) == len(paths)
    assert all(path.startswith("batch") for path in paths)


def test_torch_has_a_second_device_for_these_tests() -> None:
    assert torch.zeros(1).to("meta").device.type == "meta"
