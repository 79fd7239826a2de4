"""`wrap` and `unwrap`: the same model, whose inputs are moved to it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from child import run_python
from torch import Tensor, nn

import devicekit

CPU, META = torch.device("cpu"), torch.device("meta")
METHODS = ("encode", "forward")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"outputs": "cpu"},
    {"outputs": "inputs"},
    {"methods": METHODS},
    {"methods": METHODS, "outputs": "inputs"},
]
each_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


class Net(nn.Module):
    """A model of somebody else that notes what reaches its forward."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, device=device)

    def encode(self, x: Tensor) -> Tensor:
        """Return features."""
        return self.layer(x)

    def forward(self, x: Tensor, scale: Any = None, *, extra: Any = None) -> Tensor:
        y = self.encode(x)
        return y if scale is None else y * scale


class Echo(nn.Module):
    """Returns what it is called with."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def again(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)


# What stays


@each_options
def test_a_wrapped_model_is_the_same_object_of_the_same_class(options: dict[str, Any]) -> None:
    net = Net()
    keys, names = list(net.state_dict()), dir(Net)

    wrapped = devicekit.wrap(net, **options)

    assert wrapped is net
    assert type(net) is Net
    assert list(net.state_dict()) == keys
    assert dir(Net) == names


@each_options
def test_unwrap_restores_a_model_to_the_byte(options: dict[str, Any]) -> None:
    net = Net()
    net.register_forward_pre_hook(print_nothing)
    before = pickle.dumps(net)

    devicekit.wrap(net, **options)
    assert pickle.dumps(net) != before
    assert devicekit.unwrap(net) is net

    assert pickle.dumps(net) == before


def print_nothing(module: nn.Module, args: Any) -> None:
    """A hook that can be pickled."""


def test_unwrap_of_what_is_not_wrapped_does_nothing() -> None:
    net = Net()
    before = pickle.dumps(net)

    assert devicekit.unwrap(net) is net
    assert devicekit.unwrap(7) == 7

    assert pickle.dumps(net) == before


@each_options
def test_wrapping_twice_is_wrapping_once(options: dict[str, Any]) -> None:
    net = devicekit.wrap(Net(), **options)
    before = pickle.dumps(net)

    devicekit.wrap(net, **options)

    assert pickle.dumps(net) == before
    assert len(net._forward_pre_hooks) == len(net._forward_hooks) == 1


def test_new_options_replace_the_old() -> None:
    net = devicekit.wrap(Net(META), methods=METHODS, outputs="cpu")

    devicekit.wrap(net)

    assert "encode" not in vars(net)
    assert net(torch.ones(1, 3)).device == META


# Inputs


def test_inputs_are_moved_wherever_they_are_passed() -> None:
    echo = devicekit.wrap(Echo())

    args, kwargs = echo(torch.ones(1), {"a": [torch.ones(2)]}, "text", mask=torch.ones(3), n=1)

    assert args[0].device == args[1]["a"][0].device == kwargs["mask"].device == META
    assert (args[2], kwargs["n"]) == ("text", 1)


def test_inputs_that_are_there_are_handed_over_as_they_are() -> None:
    echo = devicekit.wrap(Echo(CPU))
    x, batch = torch.ones(1), {"a": torch.ones(2)}

    args, kwargs = echo(x, batch, n=None, mask=x)

    assert args[0] is x
    assert args[1] is batch
    assert kwargs["mask"] is x


def test_a_tensor_that_is_passed_twice_stays_one() -> None:
    echo = devicekit.wrap(Echo())
    x = torch.ones(1)

    args, kwargs = echo(x, [x], key=x)

    assert args[0] is args[1][0] is kwargs["key"]


def test_what_the_caller_passes_is_not_changed() -> None:
    echo = devicekit.wrap(Echo())
    batch = {"a": torch.ones(2)}

    echo(batch)

    assert batch["a"].device == CPU


def test_a_model_without_tensors_passes_inputs_on() -> None:
    relu = devicekit.wrap(nn.ReLU())

    assert relu(torch.ones(1)).device == CPU
    assert relu(torch.ones(1, device=META)).device == META


def test_a_model_with_buffers_alone_takes_inputs_there() -> None:
    norm = devicekit.wrap(nn.BatchNorm1d(3, affine=False, device=META))

    assert norm(torch.ones(2, 3)).device == META


def test_inputs_follow_a_model_that_moves_later() -> None:
    net = devicekit.wrap(Net())
    assert net(torch.ones(1, 3)).device == CPU

    net.to(META)

    assert net(torch.ones(1, 3)).device == META


def test_a_lazy_model_is_shaped_by_inputs_that_have_arrived() -> None:
    lazy = devicekit.wrap(nn.LazyLinear(2, device=META))

    assert lazy(torch.ones(1, 3)).device == META
    assert lazy.weight.shape == (2, 3)


def test_other_hooks_see_what_forward_gets() -> None:
    net = Net(META)
    seen: list[torch.device] = []
    net.register_forward_pre_hook(lambda _, args: seen.append(args[0].device))

    devicekit.wrap(net)(torch.ones(1, 3))

    assert seen == [META]


def test_an_input_that_cannot_be_moved_is_named() -> None:
    echo = devicekit.wrap(Echo(CPU))

    with pytest.raises(devicekit.MoveError, match=r"batch\['mask'\] could not be moved to cpu"):
        echo(torch.ones(1), mask=torch.ones(1, device=META))


def test_wrapped_models_nest() -> None:
    inner = devicekit.wrap(Net(META))
    outer = devicekit.wrap(nn.Sequential(inner, nn.ReLU()))

    assert outer(torch.ones(1, 3)).device == META
    devicekit.unwrap(outer)
    assert outer(torch.ones(1, 3)).device == META


def test_threads_do_not_disturb_each_other() -> None:
    echo = devicekit.wrap(Echo(), methods=("forward", "again"), outputs="inputs")

    def call(device: torch.device) -> set[torch.device]:
        results = [echo.again(torch.ones(1, device=device))[0][0].device for _ in range(50)]
        return set(results)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(call, [META] * 8))

    assert answers == [{META}] * 8


# Outputs


def test_outputs_stay_where_the_model_is() -> None:
    assert devicekit.wrap(Net(META))(torch.ones(1, 3)).device == META


def test_outputs_go_to_a_device() -> None:
    echo = devicekit.wrap(Echo(CPU), outputs="meta")

    args, kwargs = echo(torch.ones(1), key=torch.ones(2))

    assert args[0].device == kwargs["key"].device == META


@pytest.mark.parametrize("methods", [("forward",), ("again", "forward"), ("again",)], ids=str)
def test_outputs_go_back_to_where_inputs_came_from(methods: tuple[str, ...]) -> None:
    echo = devicekit.wrap(Echo(META), methods=methods, outputs="inputs")
    call = echo.again if "again" in methods else echo

    assert call(1, [torch.ones(1, device=META)])[0][1][0].device == META
    assert call(1)[0] == (1,)


def test_what_entry_points_pass_to_each_other_is_no_output_yet() -> None:
    class Model(Echo):
        def again(self, *args: Any, **kwargs: Any) -> Any:
            inside = self(*args, **kwargs)
            assert inside[0][0].device == CPU
            return inside

    model = devicekit.wrap(Model(CPU), methods=("forward", "again"), outputs="meta")

    assert model.again(torch.ones(1))[0][0].device == META
    assert model(torch.ones(1))[0][0].device == META


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ("cuda0", r"'cuda0' is not a device. Did you mean 'cuda:0'\?"),
        ("input", r"^'input' is neither a device nor 'inputs'. Did you mean 'inputs'\?$"),
        ("Inputs ", r"^'Inputs ' is neither a device nor 'inputs'. Did you mean 'inputs'\?$"),
        (3.5, "3.5 is not a device but of type float"),
        (torch.ones(2), "is not a device but of type Tensor"),
        (torch.ones(2).numpy(), "is not a device but of type ndarray"),
    ],
    ids=str,
)
def test_outputs_must_be_a_device(outputs: Any, message: str) -> None:
    net = Net()

    with pytest.raises(devicekit.InvalidDeviceError, match=message):
        devicekit.wrap(net, outputs=outputs)

    assert not net._forward_pre_hooks


# Methods


def test_methods_take_inputs_from_anywhere() -> None:
    net = Net(META)

    devicekit.wrap(net, methods="encode")

    assert net.encode(torch.ones(1, 3)).device == META
    assert net.encode(x=torch.ones(1, 3)).device == META
    with pytest.raises(RuntimeError, match="device"):
        net(torch.ones(1, 3), scale=torch.ones(2))  # forward was not named


def test_a_replaced_method_looks_like_the_method() -> None:
    net = devicekit.wrap(Net(), methods=("encode",))

    assert net.encode.__name__ == "encode"
    assert net.encode.__doc__ == "Return features."
    assert net.encode.__self__ is net
    assert list(inspect.signature(net.encode).parameters) == ["x"]


def test_methods_of_every_kind_can_be_replaced() -> None:
    class Model(Echo):
        @staticmethod
        def static(x: Tensor) -> Tensor:
            return x

        @classmethod
        def of_class(cls, x: Tensor) -> tuple[type, Tensor]:
            return cls, x

    model = Model()
    model.own = lambda x: x

    devicekit.wrap(model, methods=("static", "of_class", "own"))

    x = torch.ones(1)
    assert model.static(x).device == model.own(x).device == META
    assert model.of_class(x)[0] is Model
    assert devicekit.unwrap(model).own(x) is x


def test_methods_that_a_model_takes_from_another_are_replaced_too() -> None:
    compiled = torch.compile(Net(META), backend="eager")

    devicekit.wrap(compiled, methods=("encode",))

    assert compiled.encode(torch.ones(1, 3)).device == META
    assert "encode" not in vars(compiled._orig_mod)


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        ((), ValueError, "methods is empty"),
        (None, TypeError, "^methods is None: expected the names of one or more methods that take"),
        (5, TypeError, "^methods is 5: expected the names"),
        ((None,), TypeError, r"^methods is \(None,\): expected the names"),
        (([],), TypeError, r"^methods is \(\[\],\): expected the names"),
        ([Net.forward], TypeError, r"^methods is \[<function Net.forward.*: expected the names"),
        ("generate", AttributeError, "Net has no method 'generate'"),
        ("training", AttributeError, "Net has no method 'training'"),
        ("__call__", TypeError, "Python looks it up on the class"),
        ("layer", TypeError, r"write wrap\(model.layer\)"),
    ],
)
def test_what_is_no_method_is_refused(methods: Any, error: type[Exception], message: str) -> None:
    net = Net()

    with pytest.raises(error, match=message):
        devicekit.wrap(net, methods=methods)

    assert devicekit.unwrap(net) is net


# What is no model


class Unfinished(nn.Module):
    """Its `__init__` does not call that of `nn.Module`."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Linear,
            r"^Linear is a class: expected an object of it. Write wrap\(Linear\(\.\.\.\)\)",
        ),
        (None, "^None is no model: expected a module, or an object that holds one"),
        (5, "^5 is no model"),
        ("model", "^'model' is no model"),
        ({"model": 1}, "^{'model': 1} is no model"),
        (torch.zeros(1), r"^tensor\(\[0.\]\) is no model"),
        (torch.optim.SGD([torch.zeros(1)]), "(?s)^SGD .* is no model"),
        (run_python, "^<function run_python at .* is no model"),
        (Net().forward, "(?s)^<bound method Net.forward of .* is no model"),
        (Unfinished(), r"^Unfinished has no hooks.* Call super\(\).__init__\(\) in its __init__.$"),
        (mock.Mock(spec=nn.Module), r"^Mock only looks like a module: .* torch.nn.Identity\(\)"),
        (mock.Mock(spec=Net()), "^Mock only looks like a module"),
    ],
    ids=[
        "class",
        "none",
        "int",
        "str",
        "dict",
        "tensor",
        "optimizer",
        "function",
        "bound",
        "init",
        "mock",
        "mock-net",
    ],
)
@pytest.mark.parametrize("methods", ["forward", "generate"])
def test_what_is_no_model_is_refused(model: Any, message: str, methods: str) -> None:
    with pytest.raises(TypeError, match=message):
        devicekit.wrap(model, methods=methods)

    assert devicekit.unwrap(model) is model


# Objects that are no modules


class Pipeline:
    def __init__(self, model: Any) -> None:
        self.limit = 3
        self.model = model

    def predict(self, x: Tensor) -> Any:
        model = self.model["net"] if isinstance(self.model, dict) else self.model
        return model(x) if model is not None else x

    def __call__(self, x: Tensor) -> Any:
        return self.predict(x)


@pytest.mark.parametrize("hold", [lambda net: net, lambda net: {"net": net}], ids=["it", "dict"])
def test_an_object_that_holds_a_module_is_wrapped_by_its_methods(
    hold: Callable[[nn.Module], Any],
) -> None:
    pipeline = Pipeline(hold(Net(META)))
    before = pickle.dumps(pipeline)

    assert devicekit.wrap(pipeline, methods=("predict",)) is pipeline
    assert devicekit.wrap(pipeline, methods=("predict",)) is pipeline

    assert pipeline(torch.ones(1, 3)).device == META
    assert pickle.loads(pickle.dumps(pipeline))(torch.ones(1, 3)).device == META
    assert pickle.dumps(devicekit.unwrap(pipeline)) == before


def test_an_object_without_a_module_passes_inputs_on() -> None:
    pipeline = devicekit.wrap(Pipeline(None), methods=("predict",))

    assert pipeline(torch.ones(1)).device == CPU


def test_an_object_is_wrapped_by_methods_that_are_named() -> None:
    with pytest.raises(AttributeError, match=r"no method 'forward': .* methods=\("):
        devicekit.wrap(Pipeline(None))


def test_an_object_that_cannot_hold_attributes_is_refused() -> None:
    class Slotted:
        __slots__ = ()

        def predict(self) -> None: ...

    with pytest.raises(TypeError, match="__slots__"):
        devicekit.wrap(Slotted(), methods="predict")


# Copies


@each_options
def test_copies_are_wrapped_and_their_own(options: dict[str, Any]) -> None:
    net = devicekit.wrap(Net(), **options)

    for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        net.to(META)
        assert devicekit.wrap(twin, **options) is twin
        assert len(twin._forward_pre_hooks) == 1
        assert twin(torch.ones(1, 3)).device == CPU
        assert twin.encode(torch.ones(1, 3)).device == CPU


def test_shallow_copies_call_their_own_methods() -> None:
    net = devicekit.wrap(Net(), methods=METHODS)

    twin = copy.copy(net)
    twin._modules = {"layer": nn.Linear(3, 2, device=META)}

    assert twin(torch.ones(1, 3)).device == META
    assert net(torch.ones(1, 3)).device == CPU
    assert net.encode.__self__ is net


def test_a_replica_of_data_parallel_takes_inputs_to_itself() -> None:
    net = devicekit.wrap(Net(), methods=METHODS)
    replica = net._replicate_for_data_parallel()
    layer = net.layer._replicate_for_data_parallel()
    layer._former_parameters = {}
    for name, parameter in net.layer.named_parameters():
        setattr(layer, name, parameter.to(META))
        layer._former_parameters[name] = getattr(layer, name)
    replica._modules["layer"] = layer

    assert replica(torch.ones(1, 3)).device == META
    assert net(torch.ones(1, 3)).device == CPU


def test_hooks_registered_on_an_unpickled_model_do_not_replace_ours(tmp_path: Path) -> None:
    # torch numbers hooks anew in each process, and a number may be taken already.
    model = devicekit.wrap(nn.Linear(3, 2))
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    program = (
        "import pickle, devicekit\n"
        "model = pickle.load(open('model.pickle', 'rb'))\n"
        "model.register_forward_pre_hook(lambda module, args: None)\n"
        "print(len(model._forward_pre_hooks))\n"
    )

    done = run_python("-c", program, cwd=tmp_path)

    assert done.stdout == "2\n", done.stderr


# Two devices inside


class Masked(Net):
    """Has a mask that does not move with it."""

    def __init__(self) -> None:
        super().__init__(META)
        self.mask = torch.ones(2)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.mask


@pytest.mark.parametrize("method", ["forward", "encode"])
@pytest.mark.parametrize("outputs", [None, "inputs"])
def test_a_tensor_that_stayed_behind_is_named(method: str, outputs: str | None) -> None:
    model = devicekit.wrap(Masked(), methods=method, outputs=outputs)
    call = model if method == "forward" else model.encode

    with pytest.raises(devicekit.DeviceMismatchError, match=r"(?s)^mask is on cpu.*meta") as caught:
        call(torch.ones(1, 3))

    assert type(caught.value.__cause__) is RuntimeError
    assert "expected device meta" in str(caught.value.__cause__)


def test_a_tensor_that_stayed_behind_is_named_once_where_wraps_nest() -> None:
    model = devicekit.wrap(nn.Sequential(devicekit.wrap(Masked())))

    with pytest.raises(devicekit.DeviceMismatchError, match=r"^mask is on cpu") as caught:
        model(torch.ones(1, 3))

    assert type(caught.value.__cause__) is RuntimeError


def test_other_errors_come_as_they_are() -> None:
    model = devicekit.wrap(Masked())  # its mask is wrong as well, but was not reached

    with pytest.raises(RuntimeError, match=r"same reduction dim") as caught:
        model(torch.ones(1, 4))

    assert type(caught.value) is RuntimeError
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("methods", [("forward",), ("encode",)], ids=str)
def test_an_error_that_check_cannot_explain_comes_as_it_is(methods: tuple[str, ...]) -> None:
    class Forgetful(Net):
        def encode(self, x: Tensor) -> Tensor:
            return self.layer(x) * torch.ones(2)  # made on the CPU

    model = devicekit.wrap(Forgetful(META), methods=methods)

    with pytest.raises(RuntimeError, match="expected device meta") as caught:
        (model if methods == ("forward",) else model.encode)(torch.ones(1, 3))

    assert type(caught.value) is RuntimeError


def test_a_forward_that_returns_nothing_says_nothing_of_other_errors() -> None:
    class Silent(Echo):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            return None

    model = devicekit.wrap(Silent())

    try:
        msg = "not on the same device"
        raise RuntimeError(msg)
    except RuntimeError:
        assert model(torch.ones(1)) is None
    assert model(torch.ones(1)) is None


# Compilers


# Of any hook that looks at a result with a graph, with every warning an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@each_options
def test_a_compiled_model_has_no_graph_break(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    net = devicekit.wrap(Net(), **options)
    x = torch.ones(1, 3)

    compiled = torch.compile(net, fullgraph=True, backend="eager")

    torch.testing.assert_close(compiled(x, extra={"a": [x]}), net(x))
    torch.testing.assert_close(compiled(x, scale=2.0), net(x, scale=2.0))


@each_options
def test_a_compiled_model_can_be_wrapped(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    net = Net()
    compiled = devicekit.wrap(torch.compile(net, fullgraph=True, backend="eager"), **options)

    assert torch.equal(compiled(torch.ones(1, 3)), net(torch.ones(1, 3)))
    assert "encode" not in vars(net)
    assert not net._forward_pre_hooks


def test_a_compiled_model_moves_its_inputs() -> None:
    torch._dynamo.reset()
    net = devicekit.wrap(Net(META))
    nested = devicekit.wrap(Echo(CPU), outputs="inputs")

    assert torch.compile(net, fullgraph=True, backend="eager")(torch.ones(1, 3)).device == META
    args, _ = torch.compile(nested, fullgraph=True, backend="eager")(1, {"a": [torch.ones(1)]})
    assert args[1]["a"][0].device == CPU
    args, _ = torch.compile(nested, fullgraph=True, backend="eager")(1)
    assert args == (1,)


@each_options
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_wrapped_model_can_be_traced(options: dict[str, Any]) -> None:
    net, x = devicekit.wrap(Net(), **options), torch.ones(1, 3)

    traced = torch.jit.trace(net, x)

    assert torch.equal(traced(x), net(x))


@each_options
@pytest.mark.parametrize("strict", [False, True])
def test_a_wrapped_model_can_be_exported(options: dict[str, Any], strict: bool) -> None:
    net, x = devicekit.wrap(Net(), **options), torch.ones(1, 3)

    program = torch.export.export(net, (x,), {"scale": x[:, :2]}, strict=strict)

    assert torch.equal(program.module()(x, scale=x[:, :2]), net(x, scale=x[:, :2]))


def test_a_traced_model_can_be_wrapped() -> None:
    program = torch.export.export(nn.Linear(3, 2), (torch.ones(1, 3),)).module()

    devicekit.wrap(program)

    assert program(torch.ones(1, 3)).shape == (1, 2)
    assert devicekit.unwrap(program) is program


# Processes

RANK = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import devicekit

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
inner = devicekit.wrap(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
model = devicekit.wrap(DistributedDataParallel(inner), outputs="inputs")
out = model(torch.full((4, 3), float(rank + 1)))
out.sum().backward()
grad = inner[0].bias.grad.clone()
other = grad.clone()
dist.broadcast(other, src=0)
print(torch.equal(grad, other), len(model.state_dict()))
dist.destroy_process_group()
"""


def test_ddp_on_two_ranks_works_inside_and_outside(tmp_path: Path) -> None:
    def rank(number: int) -> str:
        file = tmp_path / "meeting"
        done = run_python("-W", "ignore", "-c", RANK, str(number), str(file), cwd=tmp_path)
        return done.stdout or done.stderr

    with ThreadPoolExecutor(2) as pool:
        printed = list(pool.map(rank, range(2)))

    assert printed == ["True 2\n", "True 2\n"]
