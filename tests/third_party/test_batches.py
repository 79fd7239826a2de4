"""Batches of other libraries come out of `move` as what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devicekit

META = torch.device("meta")


def batch_encoding() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding({"input_ids": torch.ones(2, 3), "names": ["a", "b"]})


def batch_feature() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchFeature({"pixel_values": torch.ones(2, 3)})


def model_output() -> Any:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.BaseModelOutput(last_hidden_state=torch.ones(2, 3))


def tensor_dict() -> Any:
    tensordict = pytest.importorskip("tensordict")
    return tensordict.TensorDict({"a": torch.ones(2, 3)}, batch_size=[2])


def graph() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return data.Data(x=torch.ones(2, 3), edge_index=torch.zeros(2, 1, dtype=torch.long))


BATCHES = (batch_encoding, batch_feature, model_output, tensor_dict, graph)
each_batch = pytest.mark.parametrize("make", BATCHES, ids=lambda make: make.__name__)


@each_batch
def test_batches_move(make: Any) -> None:
    batch = make()

    moved = devicekit.move(batch, "meta")

    assert type(moved) is type(batch)
    assert devicekit.device_of(moved) == META
    assert {value.device for value in tensors(moved)} == {META}


@each_batch
def test_batches_are_not_changed(make: Any) -> None:
    batch = make()

    devicekit.move(batch, "meta")

    assert {value.device for value in tensors(batch)} == {torch.device("cpu")}


@each_batch
def test_batches_that_are_there_come_back_as_they_are(make: Any) -> None:
    batch = make()

    assert devicekit.move(batch, "cpu") is batch


def tensors(batch: Any) -> list[torch.Tensor]:
    values = batch.to_dict() if hasattr(batch, "to_dict") else dict(batch.items())
    return [value for value in values.values() if isinstance(value, torch.Tensor)]
