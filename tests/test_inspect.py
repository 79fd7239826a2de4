"""inspect: which tensors are where, and what is odd about it. On the CPU and meta."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import devicekit
from devicekit import DeviceReport, inspect
from devicekit._inspect.report import Located, Place

CPU, META = torch.device("cpu"), torch.device("meta")
UNFINISHED = pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated):UserWarning")


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.mask = torch.ones(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) @ self.mask


def half_on_meta() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def paths(found: tuple[Located, ...]) -> list[str]:
    return [tensor.path for tensor in found]


# ---- what is where -------------------------------------------------------------------------------


def test_counts_parameters_buffers_and_bytes() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    report = inspect(model)

    by_hand = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert report.places == (Place(CPU, 4, 3, 0, by_hand, ("0.weight", "0.bias", "1.weight")),)
    assert report.bytes == by_hand
    assert report.places[0].tensors == 7
    assert report.device == CPU
    assert report.devices == (CPU,)
    assert report.input_device == CPU
    assert not report.is_split


def test_a_split_model_is_on_several_devices() -> None:
    report = inspect(half_on_meta())

    assert report.is_split
    assert set(report.devices) == {CPU, META}
    assert report.home == CPU
    assert paths(report.away) == ["1.weight", "1.bias"]
    assert [(part.path, part.device) for part in report.parts] == [("0", CPU), ("1", META)]
    with pytest.raises(
        devicekit.DeviceMismatchError, match=r"^1\.weight and 1\.bias are"
    ) as caught:
        _ = report.device
    assert caught.value.devices == (CPU, META)
    assert caught.value.paths == ("1.weight", "1.bias")


def test_what_holds_nothing_has_no_device() -> None:
    report = inspect(nn.ReLU())

    assert report.devices == ()
    assert report.input_device is None
    assert str(report) == "ReLU holds no tensor."
    assert "ReLU holds no tensor." in report._repr_html_()
    with pytest.raises(devicekit.NoDeviceError, match=r"^ReLU holds no tensor"):
        _ = report.device


def test_the_largest_are_the_examples() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(50, 50), nn.Linear(5, 5), nn.Linear(9, 9))

    assert inspect(model).places[0].examples == ("1.weight", "3.weight", "1.bias")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: torch.ones(2), ["Tensor"]),
        (lambda: [torch.ones(2), {"a": (torch.ones(3), None)}], ["[1]['a'][0]", "[0]"]),
        (lambda: SimpleNamespace(x=torch.ones(2)), ["x"]),
        (lambda: {"gen": nn.Linear(1, 2), "data": torch.ones(1)}, ["['gen'].weight"]),
    ],
    ids=["tensor", "containers", "namespace", "model in a dict"],
)
def test_anything_that_holds_tensors_can_be_asked(
    make: Callable[[], Any], names: list[str]
) -> None:
    report = inspect(make())

    assert report.device == CPU
    assert set(names) <= set(report.places[0].examples)


def test_a_type_of_ones_own_is_looked_into() -> None:
    class Graph:
        def __init__(self, nodes: Tensor) -> None:
            self.nodes = nodes

    devicekit.register(Graph, lambda graph, fn: Graph(fn(graph.nodes)))

    assert inspect([Graph(torch.ones(2, device="meta"))]).device == META


def test_a_pipeline_is_asked_like_a_model() -> None:
    class Pipeline:
        def __init__(self) -> None:
            self.unet = nn.Linear(2, 2)

    report = inspect(Pipeline())

    assert report.name == "Pipeline"
    assert report.places[0].examples == ("unet.weight", "unet.bias")


def test_structures_that_hold_themselves_end() -> None:
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)

    assert inspect(loop).places[0].others == 1


# ---- memory --------------------------------------------------------------------------------------


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight

    report = inspect(model)

    assert report.bytes == 64
    assert report.places[0].parameters == 1
    assert report.ties == (("0.weight", "1.weight"),)


def test_a_module_that_is_used_twice_ties_its_weights() -> None:
    layer = nn.Linear(4, 4)

    report = inspect(nn.ModuleDict({"a": layer, "b": layer}))

    assert report.ties == (("a.weight", "b.weight"), ("a.bias", "b.bias"))


def test_parameters_that_share_memory_are_tied() -> None:
    first = nn.Linear(4, 4, bias=False)
    second = nn.Linear(4, 4, bias=False)
    second.weight.data = first.weight.data

    report = inspect(nn.Sequential(first, second))

    assert report.bytes == 64
    assert report.ties == (("0.weight", "1.weight"),)


def test_views_count_once() -> None:
    whole = torch.ones(100)

    assert inspect([whole[:10], whole[50:], whole.view(10, 10)]).bytes == 400
    assert inspect(torch.ones(1).expand(1000)).bytes == 4


def compressed(make: Callable[..., Tensor], rows: Any, columns: Any, values: Any) -> Tensor:
    return make(rows, columns, values, check_invariants=True)


@UNFINISHED
@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda: torch.eye(3).to_sparse(), 2 * 3 * 8 + 3 * 4),
        (
            lambda: compressed(torch.sparse_csr_tensor, [0, 1, 2], [0, 1], [1.0, 2.0]),
            3 * 8 + 2 * 8 + 2 * 4,
        ),
        (
            lambda: compressed(torch.sparse_csc_tensor, [0, 1, 2], [0, 1], [1.0, 2.0]),
            3 * 8 + 2 * 8 + 2 * 4,
        ),
        (
            lambda: compressed(torch.sparse_bsr_tensor, [0, 1], [0], torch.ones(1, 2, 2)),
            2 * 8 + 8 + 4 * 4,
        ),
        (
            lambda: compressed(torch.sparse_bsc_tensor, [0, 1], [0], torch.ones(1, 2, 2)),
            2 * 8 + 8 + 4 * 4,
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 5 * 4),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            5 * 4 + 3 * 8,
        ),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), 3),
        (lambda: torch.ones(2, 2).to_mkldnn(), 16),
        (lambda: torch.ones(3, 3, device="meta"), 36),
        (lambda: nn.Parameter(torch.ones(3)), 12),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc", "nested", "jagged", "quantized", "mkldnn", "meta", "p"],
)
def test_every_layout_counts_its_parts(make: Callable[[], Tensor], nbytes: int) -> None:
    tensor = make()

    report = inspect({"x": tensor})

    assert report.bytes == nbytes
    assert report.device == tensor.device
    assert str(report)
    json.dumps(report.to_dict())


def test_the_report_keeps_no_tensor_alive() -> None:
    model = WithMask()
    seen = weakref.ref(model.mask), weakref.ref(model)

    report = inspect(model)
    del model
    gc.collect()

    assert [ref() for ref in seen] == [None, None]
    assert paths(report.strays) == ["mask"]


def test_nothing_is_computed() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), WithMask())
    mode = Counting()

    with mode:
        str(inspect(model))
        devicekit.check(model, [1, 2])

    assert mode.calls == 0


# ---- strays --------------------------------------------------------------------------------------


@dataclass
class Settings:
    limits: Tensor


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (torch.ones(2), "it"),
        ([torch.ones(2)], "it[0]"),
        ({"a": (1, torch.ones(2))}, "it['a'][1]"),
        (Settings(torch.ones(2)), "it.limits"),
        ([nn.Linear(1, 1, bias=False)], "it[0].weight"),
        ({"head": nn.Sequential(nn.Linear(1, 1, bias=False))}, "it['head'].0.weight"),
        (Holder(torch.ones(2)), "it.value"),
        (Holder([nn.Linear(1, 1, bias=False)]), "it.value[0].weight"),
        (torch.nn.utils.rnn.pack_sequence([torch.ones(2)]), "it.data"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_strays_are_found_wherever_they_hide(value: object, path: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    model[0].it = value

    report = inspect(model)

    assert f"0.{path}" in paths(report.strays)
    assert report.home == META
    assert str(report).startswith(f"0.{path}")
    assert not report.is_split
    with pytest.raises(devicekit.DeviceMismatchError, match=r"^0\.it"):
        _ = report.device


def test_a_stray_in_the_right_place_is_named_before_it_hurts() -> None:
    report = inspect(WithMask())

    assert report.headline == "WithMask is on cpu, but .to() would leave mask behind."
    assert report.device == CPU


def test_a_stray_module_brings_its_own_strays() -> None:
    model = nn.Module()
    model.inner = [WithMask()]

    assert paths(inspect(model).strays) == [
        "inner[0].fc.weight",
        "inner[0].fc.bias",
        "inner[0].mask",
    ]


def test_what_is_registered_is_no_stray() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    model.layers = [model[0], model]
    model.weights = {"first": model[0].weight}
    model[0].parent = Holder(model)
    model.optimizer = torch.optim.SGD(model.parameters())

    assert inspect(model).strays == ()
    assert inspect(model).aliases == ()


def test_results_of_a_computation_are_no_strays() -> None:
    model = nn.Linear(2, 2)
    model.last = model(torch.ones(1, 2))

    assert inspect(model).strays == ()


def test_a_result_that_nobody_computes_anew_is_one() -> None:
    model = nn.Linear(2, 2)
    model.transposed = model.weight.t()
    model.to("meta")

    assert inspect(model).headline.startswith("transposed is on cpu, but Linear is on meta:")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        lambda m: prune.random_unstructured(m, "weight", 0.5),
        torch.nn.utils.parametrizations.weight_norm,
    ],
    ids=["weight_norm", "spectral_norm", "pruning", "parametrization"],
)
def test_weights_that_are_made_anew_are_no_strays(change: Callable[[nn.Module], Any]) -> None:
    model = nn.Linear(2, 2)
    change(model)
    with torch.no_grad():
        model(torch.ones(1, 2))

    assert inspect(model).strays == ()


def test_state_that_a_module_moves_itself_is_no_stray() -> None:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(2)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            super()._apply(fn, recurse)
            self.total = fn(self.total)
            return self

    report = inspect(Metric().to("meta"))

    assert report.strays == ()
    assert report.device == META
    assert report.input_device == META


def test_attributes_of_a_graph_are_its_compilers() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(2, device="cpu")

    model = torch.export.export(Constant(), (torch.ones(2),)).module()

    report = inspect(model)

    assert report.strays == ()
    assert report.baked == ("cpu",)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_traced_model_says_which_devices_it_has_written_down() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + torch.zeros(2, device=x.device)

    report = inspect(torch.jit.trace(Constant(), torch.ones(1, 2)))

    assert report.baked == ("cpu",)
    assert report.places[0].parameters == 2
    assert "written into a graph" in str(report)


# ---- aliases, ties, labels -----------------------------------------------------------------------


class WithAlias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, 5))
        self.alias = self.table


def test_a_second_name_of_a_buffer_is_told_before_it_goes_stale() -> None:
    report = inspect(WithAlias())

    assert report.aliases == (("alias", "table"),)
    assert report.headline.startswith("alias is a second name of table on cpu:")


def test_a_stale_alias_is_told() -> None:
    report = inspect(WithAlias().to("meta"))

    assert report.stale == (("alias", "table"),)
    assert report.headline.startswith("alias is on cpu, but WithAlias is on meta:")
    assert "alias has the shape of table" in str(report)


def test_move_leaves_no_alias_behind() -> None:
    model = devicekit.move(WithAlias(), "meta")

    assert inspect(model).stale == ()
    assert inspect(model).device == META


class Tied(nn.Module):
    """A language model as transformers declares them, of either generation."""

    _tied_weights_keys: Any = None

    def __init__(self, *, version: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.config = SimpleNamespace(tie_word_embeddings=True)
        if version == 5:
            self.all_tied_weights_keys = {"head.weight": "embed.weight"}

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


class TiedBefore5(Tied):
    _tied_weights_keys = ("head.weight",)[:1] and ["head.weight"]


@pytest.mark.parametrize(
    "model", [Tied(version=5), TiedBefore5(version=4)], ids=["version 5", "version 4"]
)
def test_ties_that_are_torn_are_told(model: nn.Module) -> None:
    assert inspect(model).torn == ()
    assert inspect(model).ties == (("embed.weight", "head.weight"),)

    model.to("meta")  # makes new parameters: pytorch/xla#2719

    assert inspect(model).torn == (("head.weight", "embed.weight"),)
    assert inspect(model).headline.startswith("head.weight is no longer tied to embed.weight")


def test_models_that_tie_nothing_have_nothing_torn() -> None:
    model = TiedBefore5(version=4)
    model.config.tie_word_embeddings = False
    model.to("meta")

    assert inspect(model).torn == ()


def test_an_attribute_that_names_another_device_is_told() -> None:
    model = nn.Linear(2, 2)
    model.device = torch.device("cpu")
    model.to("meta")

    report = inspect(model)

    assert paths(report.mislabelled) == ["device"]
    assert "device on cpu" in str(report)


# ---- parameters of other kinds -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_parameters_are_told() -> None:
    report = inspect(nn.Sequential(nn.LazyLinear(3), nn.ReLU()))

    assert report.lazy == ("0.weight", "0.bias")
    assert report.bytes == 0
    assert report.headline == "0.weight and 0.bias of Sequential get a shape in the first call."


def test_a_model_without_values_is_told() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.warns(UserWarning, match="no-op"):
        model.load_state_dict(nn.Linear(2, 2).state_dict())

    report = inspect(model)

    assert report.meta == ("weight", "bias")
    assert report.headline.startswith("weight and bias of Linear have no values: on meta.")


class _Subclass(nn.Parameter):
    """A parameter of another library, which torch takes for one."""


def test_quantized_parameters_are_told_and_their_scales_counted() -> None:
    class Params4bit(_Subclass):
        pass

    model = nn.Linear(2, 2, bias=False)
    weight = Params4bit(torch.ones(2, 2), requires_grad=False)
    weight.quant_state = SimpleNamespace(absmax=torch.ones(3, device="meta"))
    model.weight = weight

    report = inspect(model)

    assert report.quantized == ("weight",)
    assert paths(report.away) == ["weight.quant_state.absmax"]


@UNFINISHED
def test_packed_weights_have_a_device() -> None:
    model = torch.ao.nn.quantized.Linear(4, 4)

    report = inspect(model)

    assert report.device == CPU
    assert report.input_device == CPU
    assert report.quantized == ("_packed_params._packed_params",)
    assert report.places[0].others == 1


@UNFINISHED
def test_quantized_buffers_are_told() -> None:
    model = nn.Module()
    model.register_buffer("w", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8))

    assert inspect(model).quantized == ("w",)


def test_sharded_parameters_are_told() -> None:
    class DTensor(_Subclass):
        device_mesh = SimpleNamespace(device_type="cpu")

    model = nn.Linear(2, 2, bias=False)
    model.weight = DTensor(torch.ones(2, 2))

    assert inspect(model).sharded == ("weight",)
    assert inspect(model).input_device == CPU


def replica_of(model: nn.Module) -> nn.Module:
    """Do what torch.nn.parallel.replicate does with a module."""
    replica = model._replicate_for_data_parallel()
    replica._former_parameters = {}
    for key, parameter in model._parameters.items():
        if parameter is not None:
            copied = parameter * 1
            setattr(replica, key, copied)
            replica._former_parameters[key] = copied
    return replica


def test_a_replica_is_told_and_its_weights_counted() -> None:
    replica = replica_of(nn.Linear(2, 2))

    report = inspect(replica)

    assert list(replica.parameters()) == []
    assert report.places[0].parameters == 2
    assert report.replicas == ("",)
    assert report.strays == ()
    assert report.headline.startswith("Linear is a replica by DataParallel on cpu:")


# ---- optimizers ----------------------------------------------------------------------------------


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def test_an_optimizer_has_parameters_and_state() -> None:
    report = inspect(stepped(nn.Linear(2, 2)))

    assert report.places[0].parameters == 2
    assert report.places[0].others == 6
    assert report.left == ()
    assert report.device == CPU


def test_state_that_was_left_behind_is_told() -> None:
    optimizer = stepped(nn.Linear(2, 2))
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["exp_avg"] = torch.ones(2, 2, device="meta")

    report = inspect({"opt": optimizer})

    assert paths(report.left) == ["['opt'].state[0]['exp_avg']", "['opt'].state[1]['exp_avg']"]
    assert "its parameter is on cpu" in str(report)


def test_a_step_on_the_cpu_is_in_its_place() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.to("meta").parameters())
    parameter = model.weight
    optimizer.state[parameter] = {"step": torch.ones(()), "exp_avg": torch.ones_like(parameter)}

    assert inspect(optimizer).left == ()

    optimizer.param_groups[0]["capturable"] = True
    assert paths(inspect(optimizer).left) == ["state[0]['step']"]


def test_an_optimizer_that_trains_orphans_is_told() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    assert inspect([model, optimizer]).left == ()

    model.to("meta")  # makes new parameters: pytorch/xla#1623

    report = inspect([model, optimizer])
    assert paths(report.left) == [
        "[1].param_groups[0]['params'][0]",
        "[1].param_groups[0]['params'][1]",
    ]
    assert "in no module" in str(report)


# ---- device_of -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "device"),
    [
        (lambda: torch.compile(nn.Linear(2, 2, device="meta")), META),
        (lambda: nn.DataParallel(nn.Linear(2, 2, device="meta")), META),
        (lambda: replica_of(nn.Linear(2, 2)), CPU),
        (lambda: nn.BatchNorm1d(2, affine=False, device="meta"), META),
        (lambda: torch.optim.SGD([torch.ones(2, device="meta", requires_grad=True)]), META),
        (lambda: {"a": [1, torch.ones(2, device="meta")]}, META),
        (lambda: [nn.ReLU(), nn.Linear(2, 2)], CPU),
        (nn.Sequential, None),
        (lambda: "text", None),
    ],
    ids=["compiled", "DataParallel", "replica", "buffers", "SGD", "data", "list", "empty", "text"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_device_of_sees_through(make: Callable[[], Any], device: torch.device | None) -> None:
    assert devicekit.device_of(make(), None) == device


def test_device_of_asks_fsdp_where_it_computes() -> None:
    model = nn.Module()
    model._fsdp_wrapped_module = nn.Linear(2, 2)
    assert devicekit.device_of(model) == CPU

    model.compute_device = META

    assert devicekit.device_of(model) == META


# ---- how it looks --------------------------------------------------------------------------------

REPORTS: dict[str, Callable[[], Any]] = {
    "small": lambda: nn.Linear(2, 2),
    "split": half_on_meta,
    "strays": lambda: WithMask().to("meta"),
    "thousand": lambda: nn.Sequential(
        *(nn.Linear(2, 2, device="meta" if i % 2 else "cpu") for i in range(1_000))
    ),
    "long names": lambda: nn.ModuleDict(
        {f"{'x' * 120}{i}": nn.Linear(2, 2, device="meta" if i % 2 else "cpu") for i in range(30)}
    ),
    "long stray": lambda: nn.ModuleDict({"y" * 90: WithMask().to("meta")}),
    "ties": lambda: Tied(version=5),
    "optimizer": lambda: stepped(nn.Linear(2, 2)),
}
each_report = pytest.mark.parametrize("make", REPORTS.values(), ids=REPORTS)


@each_report
def test_a_report_fits_a_terminal(make: Callable[[], Any]) -> None:
    head, *lines = str(inspect(make())).splitlines()

    assert head
    assert max(map(len, lines)) <= 100
    assert len(lines) < 70


def test_a_thousand_modules_are_cut_short() -> None:
    text = str(inspect(REPORTS["thousand"]()))

    assert "\nand 990 more\n" in text
    assert text.startswith("1.weight, 1.bias, 3.weight")
    assert "and 996 more are on meta" in text.partition("\n")[0]


@each_report
def test_a_report_is_plain_json(make: Callable[[], Any]) -> None:
    report = inspect(make())

    plain = json.loads(json.dumps(report.to_dict()))

    assert plain == report.to_dict()
    assert plain["devices"] == [str(device) for device in report.devices]
    assert plain["headline"] == str(report).partition("\n")[0]
    assert plain["places"][0]["bytes"] == report.places[0].bytes


@each_report
def test_a_report_is_a_value(make: Callable[[], Any]) -> None:
    report = inspect(make())

    assert pickle.loads(pickle.dumps(report)) == report
    assert copy.deepcopy(report) == report
    assert hash(report) == hash(copy.copy(report))
    with pytest.raises(AttributeError, match="home"):
        report.home = None  # type: ignore[misc]


@each_report
def test_a_notebook_gets_a_bar_for_each_device(make: Callable[[], Any]) -> None:
    report = inspect(make())

    page = report._repr_html_()

    assert page.count("role='img'") == len(report.places)
    for opened in ("div", "table", "tr", "td", "th", "p", "ul", "li", "code", "b"):
        assert page.count(f"<{opened} ") + page.count(f"<{opened}>") == page.count(f"</{opened}>")


def test_names_cannot_write_html() -> None:
    page = inspect({"<script>": torch.ones(2), "'>": torch.ones(3)})._repr_html_()

    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_sizes_are_easy_to_read() -> None:
    shown = [
        str(inspect(torch.empty(n, dtype=torch.uint8, device="meta")))
        for n in (1000, 1536, 5 * 2**20, 300 * 2**30, 2**50)
    ]

    for text, size in zip(
        shown, ["1000 B", "1.5 KiB", "5.0 MiB", "300 GiB", "1024 TiB"], strict=True
    ):
        assert size in text


def test_many_devices_are_cut_short() -> None:
    places = tuple(Place(torch.device("cuda", i), 1, 0, 0, 4, ("w",)) for i in range(12))

    report = DeviceReport("Net", places=places)

    assert "and 2 more" in str(report)
    assert "and 2 more" in report._repr_html_()


def test_a_module_that_holds_itself_has_a_device() -> None:
    parent, child = nn.Module(), nn.Module()
    parent.child, child.parent = child, parent
    parent.linear = nn.Linear(1, 1)

    assert devicekit.device_of(parent).type == "cpu"
    assert devicekit.move(parent, {"x": torch.ones(1)})["x"].device.type == "cpu"
