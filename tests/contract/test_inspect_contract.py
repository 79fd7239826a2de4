"""Broken models, and what the report and check say of them in their first line.

On the CPU with each accelerator, fake or real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import devicekit

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_accelerator.driver import Driver

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def headline(obj: Any) -> str:
    report = devicekit.inspect(obj)
    assert str(report).partition("\n")[0] == report.headline
    return report.headline


def complaint(model: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(devicekit.DeviceMismatchError, match="on") as caught:
        devicekit.check(model, *args, **kwargs)
    assert set(caught.value.paths)
    return str(caught.value).partition("\n")[0]


@pytest.fixture
def batch(dev: torch.device) -> Tensor:
    return torch.ones(3, 4, device=dev)


# ---- ten kinds of broken model -------------------------------------------------------------------


def test_a_mask_that_was_left_behind(dev: torch.device, batch: Tensor) -> None:
    model = Net().to(dev)
    model.body.mask = torch.ones(4)

    wanted = f"body.mask is on cpu, but Net is on {dev}"
    assert headline(model).startswith(f"{wanted}: a plain attribute")
    assert complaint(model, batch) == f"{wanted}."

    model.body.register_buffer("mask", model.body.__dict__.pop("mask"), persistent=False)
    model.to(dev)
    devicekit.check(model, batch)


def test_loss_weights_that_were_left_behind(dev: torch.device, batch: Tensor) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    logits = Net().to(dev)(batch)
    target = torch.zeros(3, dtype=torch.long, device=dev)
    model = Net().to(dev)
    model.losses = {"class": loss}

    assert "is on cpu (weight)" in complaint(loss, logits.detach(), target)
    assert headline(model).startswith(f"losses['class'].weight is on cpu, but Net is on {dev}")


def test_a_model_that_was_moved_by_half(dev: torch.device, batch: Tensor) -> None:
    model = Net()
    model.body.to(dev)

    wanted = "head.weight and head.bias are on cpu"
    assert headline(model) == f"{wanted}; the rest of Net is on {dev}."
    assert complaint(model, batch) == f"{wanted}, but Net is on {dev}."
    assert {part.path: part.device for part in devicekit.inspect(model).parts} == {
        "body": dev,
        "head": CPU,
    }


class Offload:
    """What accelerate hangs on a module that it has offloaded."""

    offload = True

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device


def test_a_model_that_accelerate_has_offloaded(dev: torch.device) -> None:
    model = Net()
    for part in (model.body, model.head):
        part.to("meta")
        part._hf_hook = Offload(dev)

    report = devicekit.inspect(model)

    assert report.headline.startswith("body.weight, body.bias, head.weight and 1 more of Net:")
    assert f"offloaded by accelerate, which computes on {dev}" in report.headline
    assert report.input_device == dev
    devicekit.check(model, torch.ones(3, 4, device=dev))


def test_weights_that_were_never_loaded(dev: torch.device, batch: Tensor) -> None:
    with torch.device("meta"):
        model = Net()
    model.body.load_state_dict(nn.Linear(4, 4).to(dev).state_dict(), assign=True)

    wanted = "head.weight and head.bias are on meta"
    assert headline(model).startswith(f"{wanted}, without values")
    assert complaint(model, batch).startswith(wanted)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_lazy_layer(dev: torch.device, batch: Tensor) -> None:
    model = Net().to(dev)
    model.extra = nn.LazyLinear(2)

    assert headline(model).startswith("extra.weight and extra.bias are on cpu")
    assert complaint(model, batch).startswith("extra.weight and extra.bias are on cpu")


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.inplace_move  # elsewhere torch forgets that they are lazy
def test_a_lazy_layer_in_its_place(dev: torch.device) -> None:
    model = Net()
    model.extra = nn.LazyLinear(2)

    model.to(dev)

    assert headline(model) == "extra.weight and extra.bias of Net get a shape in the first call."


def replica_of(model: nn.Module, device: torch.device) -> nn.Module:
    """Do what torch.nn.parallel.replicate does, on backends too that it cannot."""
    replica = model._replicate_for_data_parallel()
    replica._former_parameters = {}
    for key, parameter in model._parameters.items():
        if parameter is not None:
            replica._former_parameters[key] = parameter.to(device) * 1
            setattr(replica, key, replica._former_parameters[key])
    for key, child in model._modules.items():
        if child is not None:
            replica._modules[key] = replica_of(child, device)
    return replica


def test_a_replica_of_data_parallel(dev: torch.device, dev1: torch.device) -> None:
    model = Net().to(dev)
    model.body.mask = torch.ones(4, device=dev)
    replica = replica_of(model, dev1)

    report = devicekit.inspect(replica)

    assert report.headline.startswith(f"body.mask is on {dev}, but Net is on {dev1}")
    assert report.replicas == ("", "body", "head")
    assert report.input_device == dev1
    assert complaint(replica, torch.ones(3, 4, device=dev1)).startswith(f"body.mask is on {dev}")


def test_tied_weights_that_were_torn_apart(dev: torch.device, batch: Tensor) -> None:
    model = Net().to(dev)
    model.head = nn.Linear(4, 4, device=dev)
    model.head.weight = nn.Parameter(model.body.weight.cpu())
    model.all_tied_weights_keys = {"head.weight": "body.weight"}
    type(model)._tied_weights_keys = model.all_tied_weights_keys

    try:
        report = devicekit.inspect(model)
        assert report.headline.startswith("head.weight is on cpu")
        assert report.torn == (("head.weight", "body.weight"),)
        assert complaint(model, batch).startswith("head.weight is on cpu")

        model.head.to(dev)
        assert headline(model).startswith("head.weight is no longer tied to body.weight")
    finally:
        del type(model)._tied_weights_keys


def test_an_adapter_on_another_device(dev: torch.device, batch: Tensor) -> None:
    model = Net().to(dev)
    model.body.lora = nn.Linear(4, 1, bias=False)

    assert headline(model).startswith("body.lora.weight is on cpu")
    assert complaint(model, batch).startswith("body.lora.weight is on cpu")


def test_a_buffer_alias_that_went_stale(dev: torch.device, batch: Tensor) -> None:
    model = Net()
    model.register_buffer("table", torch.ones(3, 4))
    model.rows = [model.table]

    assert headline(model).startswith("rows[0] is a second name of table")

    model.to(dev)
    report = devicekit.inspect(model)
    assert report.headline.startswith("rows[0] is on cpu")
    assert report.stale == (("rows[0]", "table"),)
    assert complaint(model, batch).startswith("rows[0] is on cpu")


# ---- and more ------------------------------------------------------------------------------------


def test_inputs_that_are_elsewhere(dev: torch.device, dev1: torch.device, batch: Tensor) -> None:
    model = Net().to(dev)

    devicekit.check(model, batch)
    assert complaint(model, batch.cpu()).startswith(f"x is on cpu, but Net is on {dev}")
    assert complaint(model, x=batch.to(dev1)).startswith(f"x is on {dev1}, but Net is on {dev}")


def test_data_parallel_wants_its_model_on_the_first_device(
    dev: torch.device, dev1: torch.device, batch: Tensor
) -> None:
    if dev.type != "cuda":
        pytest.skip("DataParallel is for CUDA")
    model = nn.DataParallel(Net().to(dev1), device_ids=[0, 1])

    assert complaint(model, batch.cpu()).startswith("module.body.weight, module.body.bias")
    devicekit.check(nn.DataParallel(Net().to(dev), device_ids=[0, 1]), batch.cpu())


def test_an_optimizer_that_was_moved_by_half(dev: torch.device, batch: Tensor) -> None:
    model = Net().to(dev)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(batch).sum().backward()
    optimizer.step()
    assert devicekit.inspect([model, optimizer]).left == ()

    state = optimizer.state[model.body.weight]
    state["momentum_buffer"] = state["momentum_buffer"].cpu()

    assert headline([model, optimizer]).startswith("[1].state[0]['momentum_buffer'] is on cpu")


def test_what_a_move_has_done_is_in_the_report(dev: torch.device) -> None:
    report = devicekit.inspect(devicekit.move(Net(), dev))

    assert report.device == dev
    assert report.devices == (dev,)
    assert report.input_device == dev
    assert report.headline == f"Net is on {dev}."


@pytest.mark.parametrize("make", [lambda t: t.to_sparse(), lambda t: t[:2]], ids=["coo", "view"])
def test_every_layout_is_on_its_device(make: Callable[[Tensor], Tensor], dev: torch.device) -> None:
    tensor = make(torch.eye(4)).to(dev)

    assert devicekit.inspect([tensor]).device == dev


def test_the_tensors_are_not_touched(driver: Driver, dev: torch.device) -> None:
    model, batch = Net().to(dev), torch.ones(3, 4, device=dev)
    driver.reset_counters()

    str(devicekit.inspect(model))
    devicekit.check(model, batch)

    assert set(driver.counters().values()) == {0}
