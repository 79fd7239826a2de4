"""Models of other libraries, on an accelerator, take inputs from the CPU once they are wrapped.

Each fails before, and afterwards gives the numbers that it gives on the CPU. Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import devicekit

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::PendingDeprecationWarning"
)


@dataclass(frozen=True)
class Case:
    """A model, and what is asked of it with inputs that are on the CPU."""

    model: Any
    ask: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    moves_its_inputs: bool = False


def text(length: int = 5) -> dict[str, Tensor]:
    ids = torch.arange(2 * length).reshape(2, length) % 30 + 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def encoder() -> Case:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**TINY)).eval()
    batch = transformers.BatchEncoding(text())
    return Case(model, lambda: model(**batch).last_hidden_state)


def decoder() -> Case:
    model = tiny_gpt2()
    return Case(model, lambda: model(**text(), use_cache=False).logits)


def decoder_that_generates() -> Case:
    model = tiny_gpt2()
    return Case(
        model,
        lambda: model.generate(**text(), max_new_tokens=4, do_sample=False),
        {"methods": ("forward", "generate"), "outputs": "inputs"},
        moves_its_inputs=True,  # since transformers 5
    )


def encoder_decoder() -> Case:
    transformers = pytest.importorskip("transformers")
    model = transformers.T5ForConditionalGeneration(tiny_t5()).eval()
    batch = text() | {"decoder_input_ids": torch.ones(2, 3, dtype=torch.long)}
    return Case(model, lambda: model(**batch, use_cache=False).logits)


def encoder_decoder_that_generates() -> Case:
    transformers = pytest.importorskip("transformers")
    model = transformers.T5ForConditionalGeneration(tiny_t5()).eval()
    return Case(
        model,
        lambda: model.generate(**text(), max_new_tokens=4, do_sample=False, num_beams=2),
        {"methods": ("forward", "generate"), "outputs": "cpu"},
    )


def vision() -> Case:
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 3}
    config = transformers.ViTConfig(**{k: TINY[k] for k in TINY if k != "vocab_size"}, **sizes)
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    batch = transformers.BatchFeature({"pixel_values": torch.ones(2, 3, 8, 8)})
    return Case(model, lambda: model(**batch).last_hidden_state)


def graph_network() -> Case:
    geometric = pytest.importorskip("torch_geometric")
    layer = geometric.nn.GCNConv(3, 2)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    data = geometric.data.Data(x=torch.arange(9.0).reshape(3, 3), edge_index=edges)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, data: Any) -> Tensor:
            return self.layer(data.x, data.edge_index)

    network = Network()
    return Case(network, lambda: network(data))


def tensordict_module() -> Case:
    tensordict = pytest.importorskip("tensordict")
    nn_ = pytest.importorskip("tensordict.nn")
    model = nn_.TensorDictSequential(
        nn_.TensorDictModule(nn.Linear(3, 4), ["x"], ["hidden"]),
        nn_.TensorDictModule(nn.Linear(4, 1), ["hidden"], ["y"]),
    )
    data = tensordict.TensorDict({"x": torch.ones(2, 3)}, batch_size=[2])
    return Case(model, lambda: model(data.clone())["y"])


def metric() -> Case:
    torchmetrics = pytest.importorskip("torchmetrics")
    model = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average=None)
    return Case(model, lambda: model(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2])))


TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def tiny_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    return transformers.GPT2LMHeadModel(config).eval()


def tiny_t5() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return transformers.T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)


CASES = (
    *(encoder, decoder, decoder_that_generates, encoder_decoder, encoder_decoder_that_generates),
    *(vision, graph_network, tensordict_module, metric),
)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_wrapped_model_takes_what_is_on_the_cpu(
    make: Callable[[], Case], dev: torch.device
) -> None:
    torch.manual_seed(0)
    case = make()
    expected = case.ask()
    devicekit.move(case.model, dev)

    if not case.moves_its_inputs:
        with pytest.raises(RuntimeError, match=r"same device"):
            case.ask()
    devicekit.wrap(case.model, **case.options)
    answer = case.ask()

    assert answer.device == (dev if "outputs" not in case.options else CPU)
    torch.testing.assert_close(answer.cpu(), expected)


# Objects that are no modules


def test_a_pipeline_takes_its_model_wherever_that_is(dev: torch.device) -> None:
    pipeline = tiny_pipeline()
    expected = pipeline("hello world")
    devicekit.move(pipeline.model, dev)  # and the pipeline still believes in the CPU

    with pytest.raises(RuntimeError, match="same device"):
        pipeline("hello world")
    assert devicekit.wrap(pipeline, methods=("_forward",)) is pipeline

    answer = pipeline("hello world")
    assert answer[0]["label"] == expected[0]["label"]
    assert answer[0]["score"] == pytest.approx(expected[0]["score"])
    assert "_forward" not in vars(devicekit.unwrap(pipeline))


def tiny_pipeline() -> Any:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "hello", "world"]
    model = tokenizers.models.WordLevel(dict(zip(words, range(4), strict=True)), unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = transformers.BertConfig(**TINY)
    bert = transformers.BertForSequenceClassification(config).eval()
    return transformers.pipeline("text-classification", bert, tokenizer=fast, device="cpu")


def test_a_skorch_net_takes_its_module_wherever_that_is(dev: torch.device) -> None:
    skorch = pytest.importorskip("skorch")
    module = nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1))
    net = skorch.NeuralNetClassifier(module, device=None).initialize()
    x = torch.arange(12.0).reshape(4, 3)
    expected = net.predict_proba(x)
    devicekit.move(net.module_, dev)

    with pytest.raises(RuntimeError, match="same device"):
        net.predict_proba(x)
    devicekit.wrap(net, methods=("infer",))

    assert net.predict_proba(x) == pytest.approx(expected, abs=1e-6)


# Models that accelerate has taken over


@dataclass
class Batch:
    """What accelerate does not look into."""

    x: Tensor


class OfBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, batch: Batch) -> Tensor:
        return self.second(self.first(batch.x))


def dispatched(model: nn.Module) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, {"first": 0, "second": 1}, main_device=0)


def partly_offloaded(model: nn.Module) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, {"first": 0, "second": "cpu"}, main_device=0)


def offloaded(model: nn.Module) -> Any:
    return pytest.importorskip("accelerate").cpu_offload(model, torch.device("cuda:0"))


@pytest.mark.machine("cuda")
@pytest.mark.accelerator(n=2)
@pytest.mark.parametrize("take_over", [dispatched, partly_offloaded, offloaded])
def test_a_split_model_takes_inputs_where_it_begins(
    take_over: Callable[[nn.Module], Any], dev: torch.device
) -> None:
    model, batch = OfBatches(), Batch(torch.arange(6.0).reshape(2, 3))
    expected = model(batch)
    split = take_over(model)
    seen: list[torch.device] = []
    split.register_forward_pre_hook(lambda _, args: seen.append(args[0].x.device))

    devicekit.wrap(split, outputs="inputs")
    answer = split(batch)

    assert seen == [dev]
    assert answer.device == CPU
    torch.testing.assert_close(answer, expected)
    assert batch.x.device == CPU


def test_wrapping_changes_nothing_of_a_model_that_is_dispatched_afterwards(
    dev: torch.device,
) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, batch = devicekit.wrap(OfBatches()), Batch(torch.ones(2, 3))
    expected = model(batch)

    split = accelerate.dispatch_model(model, {"": dev}, force_hooks=True)
    answer = split(batch)
    devicekit.unwrap(split)

    torch.testing.assert_close(answer.cpu(), expected)
    assert not split._forward_pre_hooks
