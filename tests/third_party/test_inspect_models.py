"""inspect and check on models of other libraries, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import devicekit

CPU, META = torch.device("cpu"), torch.device("meta")
IDS = torch.zeros(1, 4, dtype=torch.long)
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    lib = pytest.importorskip("transformers")
    config = lib.BertConfig(**SMALL, intermediate_size=16, vocab_size=32)
    return lib.BertForMaskedLM(config), {"input_ids": IDS, "labels": IDS}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    lib = pytest.importorskip("transformers")
    config = lib.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=32, n_positions=16)
    return lib.GPT2LMHeadModel(config), {"input_ids": IDS, "attention_mask": torch.ones(1, 4)}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    lib = pytest.importorskip("transformers")
    config = lib.ViTConfig(**SMALL, intermediate_size=16, image_size=8, patch_size=4)
    return lib.ViTModel(config), {"pixel_values": torch.ones(1, 3, 8, 8)}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    lib = pytest.importorskip("transformers")
    config = lib.T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    return lib.T5ForConditionalGeneration(config), {"input_ids": IDS, "decoder_input_ids": IDS}


def whisper() -> tuple[nn.Module, dict[str, Any]]:
    lib = pytest.importorskip("transformers")
    layers = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    config = lib.WhisperConfig(
        **layers,
        d_model=8,
        vocab_size=64,
        num_mel_bins=4,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    inputs = {"input_features": torch.ones(1, 4, 16), "decoder_input_ids": IDS}
    return lib.WhisperForConditionalGeneration(config), inputs


def gcn() -> tuple[nn.Module, dict[str, Any]]:
    lib = pytest.importorskip("torch_geometric.nn")
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return lib.GCN(4, 8, num_layers=2), {"x": torch.ones(3, 4), "edge_index": edges}


def gat() -> tuple[nn.Module, dict[str, Any]]:
    lib = pytest.importorskip("torch_geometric.nn")
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return lib.GAT(4, 8, num_layers=2, norm="batch"), {"x": torch.ones(3, 4), "edge_index": edges}


def metric() -> tuple[nn.Module, dict[str, Any]]:
    lib = pytest.importorskip("torchmetrics")
    labels = torch.tensor([0, 1, 2])
    return lib.classification.MulticlassConfusionMatrix(3), {"preds": labels, "target": labels}


MODELS = (bert, gpt2, vit, t5, whisper, gcn, gat, metric)
each_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def registered(model: nn.Module) -> dict[int, torch.Tensor]:
    return {id(t): t for t in (*model.parameters(), *model.buffers())}


@each_model
def test_the_report_agrees_with_a_count_by_hand(make: Any) -> None:
    model, _ = make()

    report = devicekit.inspect(model)

    (place,) = report.places
    assert place.device == report.device == report.input_device == CPU
    assert place.parameters == len(list(model.parameters()))
    assert place.buffers == len({id(b) for b in model.buffers()})
    own = sum(t.nbytes for t in registered(model).values())
    assert own <= place.bytes
    if place.others == 0:
        assert place.bytes == own
    assert report.strays == ()
    assert report.torn == ()
    assert report.left == ()
    assert report.mislabelled == ()
    assert report.headline == f"{type(model).__name__} is on cpu."


@each_model
def test_a_correct_call_passes_in_silence(make: Any) -> None:
    model, inputs = make()

    devicekit.check(model, **inputs)
    model(**inputs)
    devicekit.check(model, **inputs)

    devicekit.check(devicekit.move(model, "meta"), **devicekit.move(inputs, "meta"))


@each_model
def test_the_wrong_input_is_named(make: Any) -> None:
    model, inputs = make()

    for name in inputs:
        wrong = inputs | {name: inputs[name].to("meta")}
        with pytest.raises(devicekit.DeviceMismatchError, match=rf"^{name}") as caught:
            devicekit.check(model, **wrong)
        assert caught.value.paths == (name,)


@each_model
def test_a_moved_model_is_where_it_was_moved_to(make: Any) -> None:
    model, _ = make()

    report = devicekit.inspect(devicekit.move(model, "meta"))

    assert report.device == META
    assert report.torn == ()


@pytest.mark.parametrize("make", [bert, gpt2, t5, whisper], ids=lambda make: make.__name__)
def test_ties_are_found_and_torn_ones_too(make: Any) -> None:
    model, _ = make()
    by_hand: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_hand.setdefault(id(parameter), []).append(name)
    tied = sorted(sorted(names) for names in by_hand.values() if len(names) > 1)

    assert sorted(sorted(names) for names in devicekit.inspect(model).ties) == tied
    assert tied

    report = devicekit.inspect(model.to("meta"))  # makes new parameters

    assert report.torn
    assert all(set(pair) <= {n for names in tied for n in names} for pair in report.torn)


def test_a_batch_is_read_by_its_names() -> None:
    transformers = pytest.importorskip("transformers")
    model, _ = bert()
    batch = transformers.BatchEncoding({"input_ids": IDS, "attention_mask": IDS.to("meta")})

    with pytest.raises(devicekit.DeviceMismatchError, match=r"^attention_mask is on meta"):
        devicekit.check(model, **batch)


def test_a_graph_as_an_input_is_looked_into() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graph = data.Data(x=torch.ones(3, 4), edge_index=IDS.to("meta"))

    class Net(nn.Linear):
        def forward(self, graph: Any) -> Any:
            return super().forward(graph.x)

    with pytest.raises(devicekit.DeviceMismatchError, match=r"^graph.*edge_index.* is on meta"):
        devicekit.check(Net(4, 4), graph)
    assert devicekit.inspect(graph).is_split


def test_a_metric_in_a_dict_is_a_stray() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    model = nn.Linear(2, 2)
    model.metrics = {"f1": torchmetrics.classification.MulticlassF1Score(3)}
    model.to("meta")

    report = devicekit.inspect(model)

    assert report.headline.startswith("metrics['f1'].")
    assert all(stray.path.startswith("metrics['f1'].") for stray in report.strays)


def test_a_metric_as_a_sub_module_is_none() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    model = nn.Linear(2, 2)
    model.metric = torchmetrics.MeanSquaredError()
    model.to("meta")

    report = devicekit.inspect(model)

    assert report.strays == ()
    assert report.device == META
    assert devicekit.device_of(torchmetrics.MeanSquaredError()) == CPU


def test_an_offloaded_model_is_reported(tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), CPU)

    report = devicekit.inspect(model)

    assert set(report.offloaded) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert report.headline.startswith("0.weight")
    assert report.input_device == CPU
    assert report.away == ()
    devicekit.check(model, torch.ones(1, 2))


def test_a_dispatched_model_is_reported(tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        {"0": "cpu", "1": "disk"},
        main_device="cpu",
        offload_dir=str(tmp_path),
    )

    report = devicekit.inspect(model)

    assert report.offloaded == ("1.weight", "1.bias")
    assert report.input_device == CPU
    assert report.away == ()
    devicekit.check(model, torch.ones(1, 2))


def test_a_tensordict_is_counted() -> None:
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict(
        {"a": torch.ones(2, 3), "b": {"c": torch.ones(2)}}, batch_size=[2]
    )

    report = devicekit.inspect(batch)

    assert report.bytes == 24 + 8
    assert report.device == CPU
