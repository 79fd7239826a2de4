"""Kinds of modules that are more than their parameters, what they leave behind, and graphs."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import devicekit
from devicekit import MoveError, move

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")


def devices_of(module: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


# Kinds of modules


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda make: make.__name__)
def test_recurrent_modules_use_the_moved_weights(
    make: Callable[..., Any], dev: torch.device
) -> None:
    here = make(4, 3, num_layers=2)
    there = copy.deepcopy(here)
    before = list(there.parameters())
    x = torch.randn(5, 2, 4)
    there(x)[0].sum().backward()

    move(there, dev)

    assert all(now is old for now, old in zip(there.parameters(), before, strict=True))
    assert all(now is old for now, old in zip(there._flat_weights, before, strict=True))
    with torch.no_grad():
        before[0].add_(1)
        here.weight_ih_l0.add_(1)
    assert torch.allclose(there(x.to(dev))[0].cpu(), here(x)[0], atol=1e-5)


@pytest.fixture
def parametrize(request: pytest.FixtureRequest) -> Iterator[Callable[[nn.Module], nn.Module]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm
        yield request.param


@pytest.mark.parametrize(
    "parametrize",
    [
        pytest.param(nn.utils.weight_norm, id="old weight norm"),
        pytest.param(nn.utils.spectral_norm, id="old spectral norm"),
        pytest.param(nn.utils.parametrizations.weight_norm, id="weight norm"),
        pytest.param(nn.utils.parametrizations.spectral_norm, id="spectral norm"),
        pytest.param(nn.utils.parametrizations.orthogonal, id="orthogonal"),
    ],
    indirect=True,
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad], ids=["grad", "no grad"])
def test_parametrized_modules_move_before_and_after_a_forward_pass(
    parametrize: Callable[[nn.Module], nn.Module], mode: Any, dev: torch.device
) -> None:
    module = parametrize(nn.Linear(4, 4)).eval()
    x = torch.ones(2, 4)
    want = module(x).detach()

    for where in (dev, CPU, dev):
        move(module, where)  # and warns of no stray

        assert devices_of(module) == {where}
        assert module.weight.device == where
        with mode():
            y = module(x.to(where))
        assert torch.allclose(y.detach().cpu(), want, atol=1e-5)
        del y


def test_parametrized_recurrent_modules_move_after_a_forward_pass(dev: torch.device) -> None:
    module = nn.utils.parametrizations.weight_norm(nn.LSTM(4, 2), "weight_hh_l0")
    module(torch.ones(1, 1, 4))

    move(module, dev)

    assert module(torch.ones(1, 1, 4, device=dev))[0].device == dev


class Metric(nn.Module):
    """As in torchmetrics: no buffers, but an `_apply` that moves plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3)
        self.seen = [torch.ones(2)]
        self.defaults = {"total": torch.zeros(3)}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Metric:
        super()._apply(fn, recurse)
        self.total = fn(self.total)
        self.seen = [fn(tensor) for tensor in self.seen]
        self.defaults["total"] = fn(self.defaults["total"])
        return self


@pytest.mark.parametrize(
    "wrap",
    [lambda m: m, lambda m: nn.Sequential(nn.Linear(1, 1), m)],
    ids=["alone", "in a model"],
)
def test_what_a_module_moves_by_itself_moves(
    wrap: Callable[[nn.Module], nn.Module], dev: torch.device
) -> None:
    metric = Metric()

    move(wrap(metric), dev)

    parts = (metric.total, metric.seen[0], metric.defaults["total"])
    assert {part.device for part in parts} == {dev}


@pytest.mark.parametrize("result", ["itself", "None"])
def test_the_to_of_a_module_is_called(result: str, dev: torch.device) -> None:
    class Own(nn.Linear):
        def to(self, device: torch.device) -> Any:  # type: ignore[override]
            self.went_to = device
            moved = super().to(device)
            return moved if result == "itself" else None

    module = Own(4, 2)

    assert move(module, dev) is module
    assert module.went_to == dev


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_scripted_modules_move(how: str, dev: torch.device) -> None:
    plain = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    module = (
        torch.jit.script(plain) if how == "script" else torch.jit.trace(plain, torch.ones(2, 4))
    )

    for where in (dev, CPU, dev):
        move(module, where)

        assert devices_of(module) == {where}
        assert module(torch.ones(2, 4, device=where)).device == where


# Dynamo takes the two names under which the fake CUDA gives one function for a mistake.
@pytest.mark.machine("plugin", "real")
def test_compiled_modules_move(dev: torch.device) -> None:
    plain = nn.Linear(4, 2)
    module = torch.compile(plain, backend="eager")
    weight = plain.weight
    module(torch.ones(2, 4))

    move(module, dev)

    assert module(torch.ones(2, 4, device=dev)).device == dev
    assert plain.weight is weight


def test_a_replica_is_left_alone(dev: torch.device) -> None:
    replica = nn.Linear(2, 2).to(dev)._replicate_for_data_parallel()
    replica.weight = torch.ones(2, 2, device=dev, requires_grad=True) * 2
    replica._former_parameters = {"weight": replica.weight}

    assert move(replica, dev) is replica
    assert devicekit.device_of(replica) == dev


def test_a_module_without_tensors_is_fine_if_the_target_is(dev: torch.device) -> None:
    module = nn.ReLU()

    assert move(module, dev) is module
    with pytest.raises(devicekit.DeviceUnavailableError, match="15"):
        move(module, f"{dev.type}:15")


# What stays behind


def test_strays_are_named(dev: torch.device) -> None:
    module = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    module[1].mask = torch.ones(3)
    module.shelf = {"scales": [torch.ones(2)]}
    module.hidden = [nn.Linear(2, 2)]

    with pytest.warns(UserWarning, match="plain attributes") as caught:
        move(module, dev)

    message = str(caught[0].message)
    for path in ("1.mask (cpu)", "shelf['scales'][0] (cpu)", "hidden[0].weight (cpu)"):
        assert path in message
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_single_numbers_on_the_cpu_are_no_strays(dev: torch.device) -> None:
    module = nn.Linear(4, 2)
    module.scale = torch.tensor(2.0)

    move(module, dev)

    assert module.scale.device == CPU


# A graph that holds the parameters


@pytest.mark.inplace_move
def test_a_graph_does_not_hinder_a_move(dev: torch.device) -> None:
    module = nn.Linear(4, 2)
    loss = module(torch.ones(1, 4)).sum()

    move(module, dev)

    assert loss.device == CPU
    assert devices_of(module) == {dev}


@pytest.mark.machine("plugin")
class TestOnAPlugin:
    def test_a_graph_is_refused_before_anything_moves(self, dev: torch.device) -> None:
        module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
        hidden = module[0](torch.ones(1, 4))
        loss = module[1](hidden).sum()
        del hidden

        with pytest.raises(MoveError, match=r"weight is held by an autograd graph.*delete") as info:
            move(module, dev)

        assert info.value.path == "0.weight"
        assert devices_of(module) == {CPU}
        loss.backward()
        del loss
        assert devices_of(move(module, dev)) == {dev}

    def test_a_gradient_in_a_graph_is_refused(self, dev: torch.device) -> None:
        module = nn.Linear(4, 2)
        module.weight.grad = torch.ones(2, 4, requires_grad=True)
        kept = module.weight.grad.exp()

        with pytest.raises(MoveError, match="weight is held by an autograd graph"):
            move(module, dev)

        assert module.weight.grad is not None
        assert devices_of(module) == {CPU}
        del kept
        assert devices_of(move(module, dev)) == {dev}
        assert module.weight.grad.device == dev

    def test_an_exported_module_is_refused(self, dev: torch.device) -> None:
        module = torch.export.export(nn.Linear(4, 2), (torch.ones(1, 4),)).module()

        with pytest.raises(MoveError, match=r"held by a weak reference, as torch\.export makes"):
            move(module, dev)

        assert devices_of(module) == {CPU}
