"""`wrap` where there are accelerators: numbers, copies, split models, and errors."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import devicekit

if TYPE_CHECKING:
    from fake_accelerator.driver import Driver

CPU = torch.device("cpu")


class Net(nn.Module):
    """Linear layers, with an entry point beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.second(self.first(x).to(self.second.weight.device))
        return y if mask is None else y * mask

    def generate(self, x: Tensor, steps: int = 2) -> Tensor:
        for _ in range(steps):
            x = torch.cat([x[:, 2:], self(x)], dim=1)
        return x


def batch() -> dict[str, Tensor]:
    return {"x": torch.arange(6.0).reshape(2, 3), "mask": torch.tensor([1.0, 0.5])}


def test_inputs_reach_the_model_from_everywhere(dev: torch.device, dev1: torch.device) -> None:
    net = Net()
    expected = net(**batch()).detach()
    devicekit.wrap(devicekit.move(net, dev))

    for place in (CPU, dev, dev1):
        answer = net(**devicekit.move(batch(), place))
        assert answer.device == dev
        torch.testing.assert_close(answer.detach().cpu(), expected)


def test_without_wrap_the_same_call_fails(dev: torch.device) -> None:
    net = devicekit.unwrap(devicekit.wrap(devicekit.move(Net(), dev)))

    with pytest.raises(RuntimeError):
        net(**batch())


def test_inputs_follow_the_model(dev: torch.device, dev1: torch.device) -> None:
    net = devicekit.wrap(Net())

    for place in (dev, dev1, CPU):
        devicekit.move(net, place)
        assert net(**batch()).device == place


def test_inputs_that_are_there_are_not_copied(dev: torch.device, driver: Driver) -> None:
    net = devicekit.wrap(devicekit.move(Net(), dev), methods=("forward", "generate"))
    inputs = devicekit.move(batch(), dev)
    driver.reset_counters()

    net(**inputs)
    net.generate(inputs["x"])

    assert driver.counters()["h2d"] == driver.counters()["d2h"] == 0


@pytest.mark.parametrize("place", [0, 1, "cpu"])
def test_outputs_go_back_to_where_inputs_came_from(
    place: Any, dev: torch.device, dev1: torch.device
) -> None:
    origin = {0: dev, 1: dev1, "cpu": CPU}[place]
    options: dict[str, Any] = {"methods": ("forward", "generate"), "outputs": "inputs"}
    net = devicekit.wrap(devicekit.move(Net(), dev), **options)
    inputs = devicekit.move(batch(), origin)

    assert net(**inputs).device == origin
    assert net.generate(inputs["x"]).device == origin


def test_methods_give_the_numbers_of_the_cpu(dev: torch.device) -> None:
    net = Net()
    x = batch()["x"]
    expected = net.generate(x).detach()

    devicekit.wrap(devicekit.move(net, dev), methods=("forward", "generate"), outputs="cpu")

    torch.testing.assert_close(net.generate(x).detach(), expected)


def test_a_split_model_takes_inputs_where_it_begins(dev: torch.device, dev1: torch.device) -> None:
    net = Net()
    expected = net(batch()["x"])
    net.first.to(dev)
    net.second.to(dev1)

    answer = devicekit.wrap(net, outputs="inputs")(batch()["x"])

    assert answer.device == CPU
    torch.testing.assert_close(answer, expected)


def test_threads_keep_their_inputs_apart(dev: torch.device, dev1: torch.device) -> None:
    net = devicekit.wrap(devicekit.move(Net(), dev), outputs="inputs")

    def call(place: torch.device) -> set[torch.device]:
        inputs = devicekit.move(batch(), place)
        return {net(**inputs).device for _ in range(20)}

    places = [dev, dev1, CPU, CPU]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, places)) == [{place} for place in places]


def test_replicas_take_inputs_to_themselves(dev: torch.device, dev1: torch.device) -> None:
    net = devicekit.wrap(devicekit.move(Net(), dev), methods=("forward", "generate"))
    expected = net(batch()["x"]).cpu()
    replica = net._replicate_for_data_parallel()
    for name, child in net.named_children():  # as torch.nn.parallel.replicate does
        twin = child._replicate_for_data_parallel()
        twin._former_parameters = {}
        for key, parameter in child.named_parameters():
            setattr(twin, key, parameter.to(dev1))
            twin._former_parameters[key] = getattr(twin, key)
        replica._modules[name] = twin

    answer = replica(batch()["x"])

    assert answer.device == dev1
    torch.testing.assert_close(answer.cpu(), expected)
    assert replica.generate(batch()["x"]).device == dev1
    assert net.generate(batch()["x"]).device == dev


def test_a_copy_on_another_device_is_its_own(dev: torch.device, dev1: torch.device) -> None:
    net = devicekit.wrap(devicekit.move(Net(), dev), methods=("forward", "generate"))

    twin = devicekit.move(copy.deepcopy(net), dev1)

    assert twin(**batch()).device == twin.generate(batch()["x"]).device == dev1
    assert net(**batch()).device == net.generate(batch()["x"]).device == dev


def test_gradients_come_back_through_the_inputs(dev: torch.device) -> None:
    net = devicekit.wrap(devicekit.move(Net(), dev), outputs="inputs")
    x = batch()["x"].requires_grad_()

    net(x).sum().backward()

    assert x.grad is not None
    assert x.grad.device == CPU
    assert net.first.weight.grad is not None
    assert net.first.weight.grad.device == dev


@pytest.mark.machine("plugin", "real")  # dynamo does not know the functions of the fake CUDA
def test_a_compiled_model_takes_inputs_from_the_cpu(dev: torch.device) -> None:
    net = Net().requires_grad_(False)
    expected = net(**batch())
    devicekit.wrap(devicekit.move(net, dev))

    answer = torch.compile(net, fullgraph=True, backend="eager")(**batch())

    assert answer.device == dev
    torch.testing.assert_close(answer.cpu(), expected)


class Masked(Net):
    """Has a mask that does not move with it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {"output": torch.ones(2)}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * self.scales["output"]


@pytest.mark.filterwarnings("ignore:Masked was moved")
@pytest.mark.parametrize("method", ["forward", "generate"])
def test_a_tensor_that_stayed_behind_is_named(method: str, dev: torch.device) -> None:
    net = devicekit.wrap(devicekit.move(Masked(), dev), methods=method)
    if method == "generate":
        devicekit.wrap(net, methods=("forward", "generate"))
    call = net if method == "forward" else net.generate

    with pytest.raises(devicekit.DeviceMismatchError, match=r"^scales\['output'\] is on") as caught:
        call(batch()["x"])

    assert caught.value.devices == (dev, CPU)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not isinstance(caught.value.__cause__, devicekit.DeviceError)
