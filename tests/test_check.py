"""check: who is on the wrong device. On the CPU and meta."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import devicekit
import devicekit.testing
from devicekit import DeviceMismatchError, check
from devicekit._inspect import hooks_of, strays_of

CPU, META = torch.device("cpu"), torch.device("meta")
HERE = torch.ones(3, 2)
AWAY = torch.ones(3, 2, device="meta")


class Net(nn.Module):
    """Takes inputs in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Any, *more: Any, scale: Any = None, **options: Any) -> Any:
        return self.fc(x)


def refused(model: Any, *args: Any, **kwargs: Any) -> DeviceMismatchError:
    with pytest.raises(DeviceMismatchError, match=r"is on|are on") as caught:
        check(model, *args, **kwargs)
    return caught.value


# ---- inputs --------------------------------------------------------------------------------------


def test_the_message_says_who_where_and_what_to_write() -> None:
    error = refused(Net(), AWAY)

    assert str(error) == (
        "x is on meta, but Net is on cpu (fc.weight and fc.bias).\n"
        "\n"
        "what   path  device  shape\n"
        "input  x     meta    (3, 2)\n"
        "\n"
        "To move the inputs:   batch = devicekit.move(model, batch)\n"
        "or the model:         model = devicekit.move(model, 'meta')"
    )
    assert error.devices == (CPU, META)
    assert error.paths == ("x",)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@pytest.mark.parametrize(
    ("args", "kwargs", "paths"),
    [
        ((HERE, AWAY), {}, ("more[0]",)),
        ((HERE, HERE, [AWAY]), {}, ("more[1][0]",)),
        ((HERE,), {"scale": AWAY}, ("scale",)),
        ((HERE,), {"mask": {"a": (1, AWAY)}}, ("mask['a'][1]",)),
        ((Pair(HERE, AWAY),), {}, ("x.b",)),
        ((AWAY,), {"scale": AWAY}, ("x", "scale")),
        ((SimpleNamespace(image=AWAY),), {}, ("x.image",)),
        ((), {"scale": AWAY}, ("scale",)),
    ],
    ids=["args", "list", "keyword", "kwargs", "namedtuple", "two", "object", "wrong call"],
)
def test_inputs_are_called_as_forward_calls_them(
    args: tuple[Any, ...], kwargs: dict[str, Any], paths: tuple[str, ...]
) -> None:
    assert refused(Net(), *args, **kwargs).paths == paths


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((HERE,), {}),
        ((HERE, HERE), {"scale": HERE, "y": [HERE]}),
        ((), {}),
        ((None, 1, "text"), {}),
    ],
    ids=["one", "many", "none", "no tensors"],
)
def test_a_good_call_passes_in_silence(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check(Net(), *args, **kwargs)


def test_scalars_on_the_cpu_are_fine() -> None:
    model = Net().to("meta")
    model.temperature = torch.tensor(2.0)
    model.register_buffer("steps", torch.tensor(0))

    check(model, AWAY, scale=torch.tensor(0.5))


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_cpu() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 2)])

    check(Net().to("meta"), packed._replace(data=packed.data.to("meta")))
    assert refused(Net().to("meta"), packed).paths == ("x.data",)


def test_the_model_is_not_called() -> None:
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    check(Never(), HERE)


def test_what_holds_nothing_wants_its_inputs_together() -> None:
    check(nn.ReLU(), AWAY)
    check(torch.add, AWAY, AWAY)
    check(torch.add, torch.tensor(1.0), torch.tensor(2.0))

    assert refused(nn.Bilinear, HERE, HERE, AWAY).paths == ("out_features",)
    assert refused(torch.add, HERE, HERE, AWAY).paths == ("args[2]",)
    assert refused(lambda a, b: a + b, HERE, AWAY).paths == ("b",)


def test_a_batch_that_was_sent_first_names_the_model_too() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))

    error = refused(loss, AWAY, AWAY)

    assert str(error).startswith(
        "input and target are on meta, but CrossEntropyLoss is on cpu (weight)."
    )


def test_methods_and_functions_can_be_checked() -> None:
    model = Net()

    def run(batch: Tensor, extra: Tensor) -> Tensor:
        return batch + extra

    assert refused(run, HERE, AWAY).paths == ("extra",)
    assert refused(model.forward, HERE, scale=AWAY).paths == ("scale",)


def test_a_pipeline_is_checked() -> None:
    class Pipeline:
        def __init__(self) -> None:
            self.unet = Net()
            self.vae = Net().to("meta")

        def __call__(self, prompt: Tensor) -> Tensor:
            return prompt

    assert refused(Pipeline(), HERE).paths == ("vae.fc.weight", "vae.fc.bias")


# ---- the model -----------------------------------------------------------------------------------


def test_weights_that_are_elsewhere_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 9), nn.Linear(9, 2, device="meta"))

    error = refused(model, HERE)

    assert str(error).startswith("1.weight and 1.bias are on meta, but Sequential is on cpu.")
    assert "parameter  1.weight  meta    (2, 9)" in str(error)
    assert "load_state_dict(state, assign=True)" in str(error)


def test_a_stray_is_named_with_what_mends_it() -> None:
    model = nn.Sequential(Net()).to("meta")
    model[0].mask = torch.ones(2)

    error = refused(model, AWAY)

    assert str(error).startswith("0.mask is on cpu, but Sequential is on meta.")
    assert "self.register_buffer('mask', mask, persistent=False)" in str(error)

    model[0].register_buffer("table", model[0].__dict__.pop("mask"), persistent=False)
    check(devicekit.move(nn.Sequential(Net()), "meta"), AWAY)


def test_a_stray_in_a_list_is_to_be_registered() -> None:
    model = Net().to("meta")
    model.tables = [torch.ones(2)]

    assert "register_buffer(), ModuleList, or ModuleDict" in str(refused(model, AWAY))


def test_several_devices_are_told_apart() -> None:
    model = Net()
    model.mask = torch.ones(2, device="meta")

    error = refused(model, AWAY, scale=HERE)

    assert error.paths == ("x", "mask")
    assert str(error).startswith("x and mask are on meta, but Net is on cpu.")


def test_many_offenders_are_cut_short() -> None:
    error = refused(Net(), *[AWAY.clone() for _ in range(30)])

    assert "and 20 more" in str(error)
    assert len(error.paths) == 30
    assert max(map(len, str(error).splitlines()[1:])) <= 100


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_lazy_model_gets_its_shape_where_it_is() -> None:
    model = nn.Sequential(nn.LazyLinear(2))

    check(model, HERE)
    assert "parameter" not in str(refused(model, AWAY))
    model.extra = nn.LazyLinear(2).to("meta")
    assert refused(model, HERE).paths == ("extra.weight", "extra.bias")


# ---- models whose inputs are brought to them -----------------------------------------------------


class Hook:
    """A hook of accelerate, as far as it is read."""

    def __init__(self, device: object, offload: bool | None = False) -> None:
        self.execution_device = device
        if offload is not None:
            self.offload = offload


def hooked(model: nn.Module, **hooks: Any) -> nn.Module:
    for name, hook in hooks.items():
        model.get_submodule("" if name == "root" else name)._hf_hook = hook
    return model


def dispatched(**hooks: Any) -> nn.Module:
    model = nn.Sequential()
    model.add_module("a", nn.Linear(2, 2))
    model.add_module("b", nn.Linear(2, 2, device="meta"))
    return hooked(model, **hooks)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dispatched(root=Hook("cpu"), a=Hook("cpu"), b=Hook("meta")),
        lambda: dispatched(root=Hook("cpu"), a=Hook("cpu"), b=Hook("cpu", offload=True)),
        lambda: dispatched(
            root=SimpleNamespace(hooks=[SimpleNamespace(), Hook("cpu")]), b=Hook("cpu", None)
        ),
    ],
    ids=["dispatched", "offloaded", "carried"],
)
def test_what_hooks_have_placed_is_no_offence(make: Callable[[], nn.Module]) -> None:
    model = make()

    check(model, HERE)
    check(model, AWAY)
    assert devicekit.inspect(model).away == ()
    assert devicekit.inspect(model).home == CPU


def test_what_is_elsewhere_than_its_hook_says_is_named() -> None:
    model = dispatched(root=Hook("cpu"), a=Hook("meta"), b=Hook("meta"))
    model.b.mask = torch.ones(2)

    assert refused(model, HERE).paths == ("a.weight", "a.bias", "b.mask")
    assert [t.path for t in devicekit.inspect(model).away] == ["a.weight", "a.bias"]


def test_a_dispatched_model_is_reported_as_one() -> None:
    report = devicekit.inspect(dispatched(root=Hook("cpu"), a=Hook("cpu"), b=Hook("meta")))

    assert report.is_split
    assert report.headline == "Sequential is dispatched over cpu and meta; its inputs go to cpu."


def test_an_offloaded_model_is_reported_as_one() -> None:
    report = devicekit.inspect(dispatched(a=Hook("cpu"), b=Hook("cpu", offload=True)))

    assert report.offloaded == ("b.weight", "b.bias")
    assert report.meta == ()
    assert not report.is_split
    assert report.device == CPU
    assert report.headline.startswith("b.weight and b.bias of Sequential: offloaded by accelerate")


def test_wrap_brings_the_inputs() -> None:
    model = devicekit.wrap(Net())

    check(model, AWAY)
    check(nn.DataParallel(model), AWAY)
    with pytest.raises(DeviceMismatchError, match=r"^x is on meta"):
        check(devicekit.unwrap(model), AWAY)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "wrapper", [torch.compile, nn.DataParallel], ids=["compile", "DataParallel"]
)
def test_wrappers_are_seen_through(wrapper: Any) -> None:
    error = refused(wrapper(Net()), HERE, scale=AWAY)

    assert error.paths == ("scale",)
    assert "but Net is on cpu" in str(error)


def test_fsdp_brings_the_inputs_and_gathers_its_shards() -> None:
    class FlatParameter(nn.Parameter):
        pass

    model = nn.Module()
    model._fsdp_wrapped_module = nn.Linear(2, 2)
    model._fsdp_wrapped_module.shard = FlatParameter(torch.ones(2, device="meta"))

    check(model, AWAY)


def test_fully_sharded_models_bring_their_inputs() -> None:
    class Sharded(Net):
        def _get_fsdp_state(self) -> None: ...

    check(Sharded(), AWAY)


def test_a_nested_input_is_listed() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged, device="meta")

    assert refused(Net(), nested).paths == ("x",)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed"
)


@needs_gloo
@pytest.mark.usefixtures("alone")
def test_ddp_is_seen_through() -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(Net(), nn.BatchNorm1d(2)))

    check(model, HERE)
    report = devicekit.inspect(model)
    assert report.headline == "DistributedDataParallel is on cpu."
    assert report.aliases == ()
    assert devicekit.device_of(model) == CPU
    assert refused(model, AWAY).paths == ("input",)


@needs_gloo
@pytest.mark.usefixtures("alone")
def test_real_shards_are_told() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = Net()
    fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))

    report = devicekit.inspect(model)

    assert report.sharded == ("fc.weight", "fc.bias")
    assert report.bytes == 6 * 4
    assert report.device == report.input_device == CPU
    check(model, AWAY)


def test_shards_are_computed_with_where_their_mesh_is() -> None:
    class DTensor(nn.Parameter):
        device_mesh = SimpleNamespace(device_type="fake")

    model = nn.Linear(2, 2)
    model.weight = DTensor(torch.ones(2, 2))
    with devicekit.testing.fake_devices(cuda=1):
        DTensor.device_mesh.device_type = "cuda"
        assert devicekit.device_of(model) == torch.device("cuda:0")


def test_strays_of_a_module_alone() -> None:
    model = Net()
    model.more = [Net(), model.fc, torch.ones(2)]

    assert [path for path, _ in strays_of(model)] == [
        "more[0].fc.weight",
        "more[0].fc.bias",
        "more[2]",
    ]


def test_hooks_are_listed_with_their_modules() -> None:
    model = dispatched(root=SimpleNamespace(hooks=[Hook("cpu"), Hook("meta")]), b=Hook("cpu"))

    assert [name for name, _ in hooks_of(model)] == ["", "", "b"]


def test_a_hook_may_leave_the_index_to_the_machine() -> None:
    with devicekit.testing.fake_devices(cuda=2):
        model = dispatched(root=Hook("cuda"), a=Hook("cuda:1"))
        assert devicekit.device_of(model) == torch.device("cuda:0")
        assert devicekit.device_of(model.a) == torch.device("cuda:1")


def test_a_hook_that_declares_nothing_is_passed_over() -> None:
    model = dispatched(root=SimpleNamespace(), a=SimpleNamespace(execution_device=None))

    assert devicekit.device_of(model) == CPU
    assert refused(model).paths == ("b.weight", "b.bias")


@pytest.mark.parametrize("model", [torch.ones(1), {"x": torch.ones(1)}, None])
def test_data_in_the_place_of_the_model_is_refused(model: object) -> None:
    with pytest.raises(devicekit.InvalidDeviceError, match=r"Write check\(model, batch\)"):
        devicekit.check(model, torch.nn.Linear(1, 1))


# ---- what only looks like a module ---------------------------------------------------------------


class NotSetUp(nn.Module):
    def __init__(self) -> None:  # does not call super().__init__()
        pass

    def __call__(self, *args: Any) -> Any:
        return args


@pytest.mark.parametrize("make", [NotSetUp, lambda: Mock(spec=nn.Module)], ids=["bare", "mock"])
def test_a_module_that_is_not_set_up_holds_nothing(make: Any) -> None:
    model = make()

    assert str(devicekit.inspect(model)).endswith("holds no tensor.")
    assert devicekit.device_of(model, None) is None
    devicekit.check(model, torch.ones(1))
    with pytest.raises(devicekit.NoDeviceError, match="Name one: move"):
        devicekit.move(model, torch.ones(1))


def test_inside_vmap_everything_is_read() -> None:
    model = nn.Linear(1, 1)

    def read(x: Tensor) -> Tensor:
        assert devicekit.inspect({"x": x}).device == devicekit.device_of(x)
        devicekit.check(model, x)
        return devicekit.move(model, x)

    assert torch.func.vmap(read)(torch.ones(3, 1)).shape == (3, 1)
