"""What `move` does with the objects of other libraries; it agrees with their own movers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import devicekit

CPU = torch.device("cpu")


# Objects


def test_a_model_output_keeps_its_class_and_its_gaps(dev: torch.device) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    states = (torch.ones(2), torch.zeros(2))
    output = outputs.BaseModelOutput(last_hidden_state=torch.ones(2), hidden_states=states)

    moved = devicekit.move(output, dev)

    assert type(moved) is outputs.BaseModelOutput
    assert list(moved.keys()) == ["last_hidden_state", "hidden_states"]
    assert moved.attentions is None
    assert moved[0] is moved.last_hidden_state is moved["last_hidden_state"]
    assert {state.device for state in moved.hidden_states} == {dev}
    assert output.last_hidden_state.device == output["hidden_states"][1].device == CPU


def test_a_batch_encoding_keeps_what_its_tokenizer_left(dev: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.ones(2, 3)}, n_sequences=1)

    moved = devicekit.move(encoding, dev)

    assert type(moved) is transformers.BatchEncoding
    assert moved.n_sequences == 1
    assert (moved["input_ids"].device, encoding["input_ids"].device) == (dev, CPU)


def test_a_batch_feature_with_lists_of_images(dev: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    feature = transformers.BatchFeature({"pixels": [torch.ones(3), torch.ones(4)], "names": ["a"]})

    moved = devicekit.move(feature, dev)

    assert type(moved) is transformers.BatchFeature
    assert [image.device for image in moved["pixels"]] == [dev, dev]
    assert moved["names"] == ["a"]
    assert feature["pixels"][0].device == CPU


def test_a_tensordict_moves_at_every_depth(dev: torch.device) -> None:
    tensordict = pytest.importorskip("tensordict")
    data = tensordict.TensorDict(
        {"a": torch.ones(2, 3), "inner": {"b": torch.zeros(2, 1)}}, batch_size=[2]
    )

    moved = devicekit.move({"data": data}, dev)["data"]

    assert type(moved) is type(data)
    assert moved.batch_size == data.batch_size
    assert moved["inner", "b"].device == dev
    assert data["a"].device == data["inner", "b"].device == CPU


def graph() -> Any:
    geometric = pytest.importorskip("torch_geometric.data")
    edges = torch.tensor([[0, 1], [1, 0]])
    return geometric.Data(x=torch.ones(2, 3), edge_index=edges, name="g")


def test_a_graph_is_not_changed(dev: torch.device) -> None:
    data = graph()

    moved = devicekit.move(data, dev)

    assert type(moved) is type(data)
    assert (moved.x.device, moved.edge_index.device, moved.name) == (dev, dev, "g")
    assert data.x.device == data.edge_index.device == CPU


def test_a_batch_of_graphs_can_be_taken_apart_again(dev: torch.device) -> None:
    geometric = pytest.importorskip("torch_geometric.data")
    batch = geometric.Batch.from_data_list([graph(), graph()])

    moved = devicekit.move(batch, dev)

    assert type(moved) is type(batch)
    assert moved.batch.device == dev
    assert moved.num_graphs == 2
    assert moved.get_example(1).x.device == dev
    assert batch.x.device == CPU


def test_a_metric_collection_moves_with_its_states(dev: torch.device) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = torchmetrics.MetricCollection(
        {"mean": torchmetrics.MeanMetric(), "all": torchmetrics.CatMetric()}
    )
    metrics.update(torch.tensor([1.0, 3.0]))
    expected = {name: value.tolist() for name, value in metrics.compute().items()}

    moved = devicekit.move(metrics, dev)
    values = moved.compute()

    assert moved is metrics
    assert {value.device for value in values.values()} == {dev}
    assert {name: value.tolist() for name, value in values.items()} == expected


@pytest.mark.parametrize("name", ["DynamicCache", "EncoderDecoderCache"])
def test_a_cache_is_named_where_it_stays_behind_and_is_itself_where_it_belongs(
    name: str, dev: torch.device
) -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    if name == "EncoderDecoderCache":
        cache = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
    batch = {"past_key_values": cache, "x": torch.ones(2)}

    assert devicekit.move(batch, CPU) is batch
    with pytest.warns(UserWarning, match=rf"batch\['past_key_values'\] \({name}\)"):
        moved = devicekit.move(batch, dev)

    assert moved["past_key_values"] is cache
    assert moved["x"].device == dev


# Refusals


def test_a_dispatched_model_is_not_moved(dev: torch.device) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    split = accelerate.dispatch_model(model, {"0": dev, "1": "cpu"}, main_device=dev)

    with pytest.raises(devicekit.MoveError, match="accelerate has"):
        devicekit.move(split, dev)

    assert split(torch.ones(1, 2)).shape == (1, 2)


def test_an_offloaded_model_is_not_moved(dev: torch.device) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(nn.Linear(2, 2), dev)

    with pytest.raises(devicekit.MoveError, match="accelerate has offloaded"):
        devicekit.move(model, dev)


# Agreement


def nested() -> dict[str, Any]:
    return {
        "ids": torch.arange(4),
        "pair": (torch.ones(2), [torch.zeros(1), torch.full((2,), 2.0)]),
        "inner": {"mask": torch.tensor([True, False])},
    }


def by_accelerate(batch: Any, device: torch.device) -> Any:
    return pytest.importorskip("accelerate.utils").send_to_device(batch, device)


def by_lightning(batch: Any, device: torch.device) -> Any:
    utilities = pytest.importorskip("lightning_fabric.utilities")
    return utilities.move_data_to_device(batch, device)


def by_ignite(batch: Any, device: torch.device) -> Any:
    return pytest.importorskip("ignite.utils").convert_tensor(batch, device)


def by_skorch(batch: Any, device: torch.device) -> Any:
    return pytest.importorskip("skorch.utils").to_device(batch, device)


@pytest.mark.parametrize("theirs", [by_accelerate, by_lightning, by_ignite, by_skorch])
def test_batches_come_out_as_from_the_movers_of_other_libraries(
    theirs: Callable[[Any, torch.device], Any], dev: torch.device
) -> None:
    ours = devicekit.move(nested(), dev)

    assert alike(ours, theirs(copy.deepcopy(nested()), dev))


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.device == b.device and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    return type(a) is type(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
