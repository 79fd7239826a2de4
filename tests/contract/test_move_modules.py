"""Modules move in place, and everything that hangs on their tensors comes along."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from devicekit import move

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_accelerator.driver import Driver

CPU = torch.device("cpu")
UNFINISHED = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def devices_of(module: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in tensors_of(module)}


def train(module: nn.Module, device: torch.device) -> torch.Tensor:
    """Run a forward and a backward pass there, and return the sum of the outputs."""
    x = torch.arange(12.0).view(3, 4).to(device)
    loss = module(x).pow(2).sum()
    loss.backward()
    return loss.detach().cpu()


# Identity


def test_move_returns_the_module_itself(dev: torch.device) -> None:
    module = nn.Linear(4, 2)

    assert move(module, dev) is module
    assert devices_of(module) == {dev}


def test_parameters_and_buffers_keep_their_identity(dev: torch.device, dev1: torch.device) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = tensors_of(module)
    values = [tensor.detach().clone() for tensor in before]

    for where in (dev, dev1, dev, CPU, dev1):
        move(module, where)

        assert devices_of(module) == {where}
        assert all(now is old for now, old in zip(tensors_of(module), before, strict=True))
    assert all(torch.equal(t.cpu(), v) for t, v in zip(before, values, strict=True))


def test_values_and_results_are_those_of_the_cpu(dev: torch.device) -> None:
    here = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    there = move(copy.deepcopy(here), dev)

    assert torch.allclose(train(there, dev), train(here, CPU), atol=1e-5)


def test_tied_parameters_stay_tied(dev: torch.device, driver: Driver) -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight

    with driver.counting() as counted:
        move(module, dev)

    assert module[1].weight is module[0].weight
    assert len(list(module.parameters())) == 1
    assert counted["h2d"] == 1


class TwoNames(nn.Module):
    """Two parameters, and two buffers, of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.same = nn.Parameter(self.weight.data)
        self.turned = nn.Parameter(self.weight.data.T)  # another view of it comes apart
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("again", self.table.detach())


def are_one(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def test_parameters_of_the_same_memory_stay_it(dev: torch.device) -> None:
    model = TwoNames()
    objects = [*model.parameters(), *model.buffers()]

    move(model, dev)

    now = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(now, objects, strict=True))
    assert are_one(model.weight, model.same)
    assert are_one(model.table, model.again)
    with torch.no_grad():
        model.weight.fill_(7)
    assert model.same.sum().item() == 42
    move(model, "cpu")
    assert are_one(model.weight, model.same)
    assert model.same.device.type == "cpu"


def test_tied_buffers_stay_tied(dev: torch.device) -> None:
    module = nn.BatchNorm1d(3)
    module.register_buffer("copy", module.running_mean)

    move(module, dev)

    assert module.copy is module.running_mean
    assert module.copy.device == dev


def test_aliases_in_plain_attributes_stay_aliases(dev: torch.device) -> None:
    module = nn.BatchNorm1d(3)
    module.mean = module.running_mean
    module.shelf = {"weights": [module.weight]}

    move(module, dev)  # and warns of no stray

    assert module.mean is module.running_mean
    assert module.shelf["weights"][0] is module.weight
    assert module.mean.device == dev


def test_buffers_that_are_not_saved_move(dev: torch.device) -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.ones(3), persistent=False)

    move(module, dev)

    assert module.mask.device == dev
    assert not module.state_dict()


@pytest.mark.parametrize("flag", ["overwrite_module_params", "swap_module_params"])
def test_no_flag_of_torch_costs_the_identity(flag: str, dev: torch.device) -> None:
    module = nn.LSTM(4, 2)
    before = list(module.parameters())
    set_flag: Callable[[bool], None] = getattr(torch.__future__, f"set_{flag}_on_conversion")

    set_flag(True)
    try:
        move(module, dev)
    finally:
        set_flag(False)

    assert all(now is old for now, old in zip(module.parameters(), before, strict=True))
    assert devices_of(module) == {dev}


# What hangs on a tensor


def test_requires_grad_is_kept(dev: torch.device) -> None:
    module = nn.Linear(4, 2)
    module.bias.requires_grad_(False)

    move(module, dev)

    assert module.weight.requires_grad
    assert not module.bias.requires_grad
    assert module.weight.is_leaf


def test_gradients_move_and_stay_the_same_objects(dev: torch.device, dev1: torch.device) -> None:
    module = nn.Linear(4, 2)
    train(module, CPU)
    grad = module.weight.grad
    assert grad is not None
    values = grad.clone()

    for where in (dev, dev1, CPU, dev):
        move(module, where)

        assert module.weight.grad is grad
        assert grad.device == where
    assert torch.equal(grad.cpu(), values)


def test_sparse_gradients_move(dev: torch.device) -> None:
    module = nn.Embedding(5, 2, sparse=True)
    module(torch.tensor([1, 2])).sum().backward()
    grad = module.weight.grad
    assert grad is not None
    values = grad.to_dense()

    move(module, dev)

    assert module.weight.grad is grad
    assert grad.layout == torch.sparse_coo
    assert torch.equal(grad.cpu().to_dense(), values)


def test_gradients_accumulate_where_the_module_is(dev: torch.device) -> None:
    module, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(module.state_dict())
    train(module, CPU)
    move(module, dev)

    train(module, dev)
    train(twin, CPU)
    train(twin, CPU)

    for ours, want in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad.cpu(), want.grad, atol=1e-4)


def test_tensor_hooks_survive(dev: torch.device) -> None:
    module, calls = nn.Linear(4, 2), []
    hook = module.weight.register_hook(lambda grad: calls.append(("hook", grad.device)))
    after = module.weight.register_post_accumulate_grad_hook(
        lambda parameter: calls.append(("after", parameter.grad.device))
    )
    train(module, CPU)
    move(module, dev)
    calls.clear()

    train(module, dev)
    hook.remove()
    after.remove()
    train(module, dev)

    assert calls == [("hook", dev), ("after", dev)]


def test_attributes_and_subclasses_of_parameters_survive(dev: torch.device) -> None:
    class Scale(nn.Parameter):
        pass

    module = nn.Module()
    module.scale = Scale(torch.ones(2))
    module.scale.decay = False
    scale = module.scale

    move(module, dev)

    assert module.scale is scale
    assert type(scale) is Scale
    assert scale.decay is False
    assert scale.device == dev


def test_module_hooks_survive(dev: torch.device) -> None:
    module, calls = nn.Linear(4, 2), []
    module.register_forward_pre_hook(lambda _module, args: calls.append(args[0].device))

    train(move(module, dev), dev)

    assert calls == [dev]


def test_inside_inference_mode_parameters_can_still_be_trained(dev: torch.device) -> None:
    module = nn.Linear(4, 2)
    with torch.inference_mode():
        move(module, dev)

    assert not module.weight.is_inference()
    assert train(module, dev) > 0


def test_modules_made_in_inference_mode_keep_their_ties(dev: torch.device) -> None:
    with torch.inference_mode():
        module = nn.BatchNorm1d(3)
        module.register_buffer("copy", module.running_mean)
    before = tensors_of(module)

    move(module, dev)

    assert all(now is old for now, old in zip(tensors_of(module), before, strict=True))
    assert module.copy is module.running_mean
    assert devices_of(module) == {dev}


# Kinds of tensors


@pytest.mark.parametrize(
    "layout",
    [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc],
    ids=str,
)
class TestSparse:
    pytestmark = UNFINISHED

    def test_parameters_move_whole(
        self, layout: torch.layout, dev: torch.device, dev1: torch.device
    ) -> None:
        block = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
        module = nn.Module()
        module.weight = nn.Parameter(torch.eye(4).to_sparse(layout=layout, **block))
        weight = module.weight

        for where in (dev, dev1, CPU):
            move(module, where)

            assert module.weight is weight
            assert weight.layout == layout
            inner = weight.detach()
            values = inner._values() if layout is torch.sparse_coo else inner.values()
            assert values.device == where
        assert torch.equal(weight.detach().to_dense(), torch.eye(4))


@pytest.mark.parametrize("make", [nn.LazyLinear, nn.LazyConv1d], ids=lambda make: make.__name__)
def test_lazy_modules_are_materialised_where_they_were_moved(
    make: Callable[..., nn.Module], dev: torch.device
) -> None:
    module = make(3, **({"kernel_size": 1} if make is nn.LazyConv1d else {}))
    weight = module.weight

    move(module, dev)

    assert isinstance(module.weight, nn.parameter.UninitializedParameter)
    y = module(torch.ones(2, 4, 5, device=dev))
    assert module.weight is weight
    assert type(weight) is nn.Parameter
    assert weight.device == y.device == dev


def test_lazy_buffers_are_materialised_there(dev: torch.device) -> None:
    module = move(nn.LazyBatchNorm1d(), dev)

    module(torch.randn(3, 4, device=dev))

    assert devices_of(module) == {dev}


class TestQuantized:
    pytestmark = UNFINISHED

    def test_buffers_keep_identity_and_ties(self, dev: torch.device) -> None:
        module = nn.Module()
        packed = torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8)
        module.register_buffer("packed", packed)
        module.register_buffer("again", packed)

        move(module, dev)

        assert module.packed is module.again is packed
        assert packed.device == dev
        assert torch.equal(packed.cpu().dequantize(), torch.ones(3))
