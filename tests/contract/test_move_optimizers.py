"""An optimizer keeps training the module that moved, and its state follows on request."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from devicekit import InvalidDeviceError, MoveError, move

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_accelerator.driver import Driver
    from torch.optim import Optimizer

CPU = torch.device("cpu")

MAKERS: list[Any] = [
    pytest.param(lambda p: torch.optim.SGD(p, lr=0.1), id="SGD"),
    pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), id="momentum"),
    pytest.param(lambda p: torch.optim.Adam(p, lr=0.1), id="Adam"),
    pytest.param(lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), id="amsgrad"),
    pytest.param(lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), id="tensor lr"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), id="foreach"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False), id="AdamW"),
    pytest.param(lambda p: torch.optim.Adagrad(p, lr=0.1), id="Adagrad"),
    pytest.param(lambda p: torch.optim.RMSprop(p, lr=0.01), id="RMSprop"),
    pytest.param(lambda p: torch.optim.NAdam(p, lr=0.1), id="NAdam"),
    pytest.param(lambda p: torch.optim.LBFGS(p, max_iter=2), id="LBFGS"),
]
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    MAKERS.append(
        pytest.param(lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.1), id="Muon")
    )
every_optimizer = pytest.mark.parametrize("make", MAKERS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step(model: nn.Module, optimizer: Optimizer) -> float:
    """Train one step where the model is, and return the loss before it."""
    device = next(model.parameters()).device
    x = torch.linspace(-1, 1, 12).view(3, 4).to(device)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert isinstance(loss, torch.Tensor)
    return loss.item()


def state_devices(optimizer: Optimizer) -> set[torch.device]:
    """Return where the state is, `step` aside."""
    found: set[torch.device] = set()

    def look(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.add(value.device)
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item)

    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                look(value)
    return found


# Made before the move


@every_optimizer
def test_an_optimizer_made_before_the_move_trains_the_model(
    make: Callable[[Any], Optimizer], dev: torch.device
) -> None:
    model = network()
    optimizer = make(model.parameters())
    move(model, dev)
    move(optimizer)  # Adagrad has its state from the start
    before = [p.detach().cpu().clone() for p in model.parameters() if p.dim() == 2]

    step(model, optimizer)

    after = [p.detach().cpu() for p in model.parameters() if p.dim() == 2]
    assert all(not torch.equal(new, old) for new, old in zip(after, before, strict=True))


@every_optimizer
@pytest.mark.parametrize("route", ["up", "across", "down"])
def test_training_goes_on_with_the_losses_of_a_twin(
    make: Callable[[Any], Optimizer], route: str, dev: torch.device, dev1: torch.device
) -> None:
    start, end = {"up": (CPU, dev), "across": (dev, dev1), "down": (dev, CPU)}[route]
    model, twin = move(network(), start), network()
    optimizer, want = make(model.parameters()), make(twin.parameters())
    losses, wanted = [], []

    for number in range(5):
        if number == 2:
            move(model, end)
            assert move(optimizer) is optimizer
            assert state_devices(optimizer) <= {end}
        losses.append(step(model, optimizer))
        wanted.append(step(twin, want))

    assert losses == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert losses[-1] < losses[0]


def test_a_learning_rate_schedule_goes_on(dev: torch.device) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    step(model, optimizer)
    schedule.step()
    move(model, dev)
    move(optimizer)
    step(model, optimizer)
    schedule.step()

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


# Where things go


def test_step_stays_on_the_cpu(dev: torch.device, driver: Driver) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    move(model, dev)

    with driver.counting() as counted:
        move(optimizer)
    with driver.counting() as again:
        move(optimizer)

    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["step"].device == CPU
        assert state["exp_avg"].device == state["exp_avg_sq"].device == dev
    assert counted["h2d"] == 2 * len(list(model.parameters()))
    assert not any(again.values())


@pytest.mark.parametrize("flag", ["capturable", "fused"])
def test_step_goes_with_its_parameter_where_it_runs_on_the_device(
    flag: str, dev: torch.device
) -> None:
    model = move(network(), dev)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    step(model, optimizer)
    optimizer.param_groups[0][flag] = True
    lr = optimizer.param_groups[0]["lr"]
    assert lr.device == CPU

    move(optimizer)

    assert all(state["step"].device == dev for state in optimizer.state.values())
    assert optimizer.param_groups[0]["lr"].device == dev
    move(model, CPU)
    move(optimizer)
    assert all(state["step"].device == CPU for state in optimizer.state.values())
    assert optimizer.param_groups[0]["lr"].device == CPU


def test_a_capturable_optimizer_goes_on(dev: torch.device) -> None:
    model, twin = move(network(), dev), network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    want = torch.optim.Adam(twin.parameters(), lr=0.1, foreach=False)
    losses = [step(model, optimizer)]
    optimizer.param_groups[0]["capturable"] = dev.type == "cuda"  # a plugin is not asked
    move(optimizer)

    losses += [step(model, optimizer), step(model, optimizer)]

    assert losses == pytest.approx([step(twin, want) for _ in range(3)], rel=1e-3)


def test_a_tensor_learning_rate_stays_the_same_object(dev: torch.device) -> None:
    lr = torch.tensor(0.1)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    step(model, optimizer)

    move(model, dev)
    move(optimizer)

    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.device == CPU


def test_state_in_the_constructor(dev: torch.device) -> None:
    model = network()
    optimizer = torch.optim.Adagrad(model.parameters())

    move(model, dev)
    move(optimizer)

    for state in optimizer.state.values():
        assert state["sum"].device == dev
        assert state["step"].device == CPU


def test_nested_state(dev: torch.device) -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    step(model, optimizer)

    move(model, dev)
    move(optimizer)

    (state,) = optimizer.state.values()
    assert state["old_dirs"]
    assert {t.device for t in (*state["old_dirs"], *state["old_stps"], state["d"])} == {dev}


def test_sparse_state(dev: torch.device) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def train(device: torch.device) -> None:
        optimizer.zero_grad()
        model(torch.tensor([1, 2], device=device)).sum().backward()
        optimizer.step()

    train(CPU)
    before = model.weight.detach().clone()
    move(model, dev)
    move(optimizer)
    train(dev)

    changed = (model.weight.detach().cpu() != before).any(1)
    assert changed.tolist() == [False, True, True, False, False]
    assert state_devices(optimizer) == {dev}


def test_parameter_groups_on_several_devices(dev: torch.device, dev1: torch.device) -> None:
    model = network()
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1.0}]
    )
    step(model, optimizer)

    move(model[0], dev)
    move(model[2], dev1)
    move(optimizer)

    assert optimizer.state[model[0].weight]["exp_avg"].device == dev
    assert optimizer.state[model[2].weight]["exp_avg"].device == dev1


def test_what_others_put_in_stays(dev: torch.device) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    mine, scores = torch.ones(3), torch.ones(2)
    optimizer.state["scores"] = scores  # type: ignore[index]
    optimizer.param_groups[0]["mine"] = mine
    state = optimizer.state[model[0].weight]

    move(model, dev)
    move(optimizer)

    assert optimizer.state["scores"] is scores  # type: ignore[index]
    assert optimizer.param_groups[0]["mine"] is mine
    assert optimizer.state[model[0].weight] is state
    assert mine.device == scores.device == CPU


def test_what_is_shared_in_the_state_stays_shared(dev: torch.device, driver: Driver) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = torch.ones(2)
    for parameter in model.parameters():
        optimizer.state[parameter]["shared"] = shared
    move(model, dev)

    with driver.counting() as counted:
        move(optimizer)

    first, second = (optimizer.state[p]["shared"] for p in model.parameters())
    assert first is second
    assert counted["h2d"] == 1


def test_the_state_dict_goes_round(dev: torch.device, dev1: torch.device) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())

    move(model, dev)
    move(optimizer)
    there = optimizer.state_dict()
    fresh = torch.optim.Adam(move(copy.deepcopy(model), dev1).parameters(), lr=0.1)
    fresh.load_state_dict(there)

    assert there.keys() == saved.keys()
    assert there["param_groups"] == saved["param_groups"]
    for number, state in saved["state"].items():
        for key, value in state.items():
            assert torch.equal(there["state"][number][key].cpu(), value)
    assert state_devices(fresh) == {dev1}


# In structures


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")], ids=str)
def test_a_model_and_its_optimizer_move_together(order: tuple[str, str], dev: torch.device) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    both = {"model": model, "optimizer": optimizer}
    training = {key: both[key] for key in order}

    assert move(training, dev) is training

    assert state_devices(optimizer) == {dev}
    step(model, optimizer)


def test_it_has_no_place_of_its_own(dev: torch.device) -> None:
    optimizer = torch.optim.SGD(network().parameters())

    with pytest.raises(InvalidDeviceError, match=r"move\(model, device\).*move\(optimizer\)"):
        move(optimizer, dev)


# Failing


@pytest.mark.parametrize("at", ["allocation", "copy"])
def test_a_move_that_fails_leaves_the_state_as_it_was(
    at: Any, dev: torch.device, driver: Driver
) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    move(model, dev)
    state = {key: dict(value) for key, value in optimizer.state.items()}
    used = driver.used(dev.index)

    for n in range(1, 9):  # two moments for each of four parameters
        driver.fail_after(n, at)
        with pytest.raises(MoveError, match=r"optimizer.state\[\d\]\['exp_avg.*as it was") as info:
            move(optimizer)

        assert info.value.path == (
            f"state[{(n - 1) // 2}]['{'exp_avg' if n % 2 else 'exp_avg_sq'}']"
        )
        assert isinstance(info.value.__cause__, torch.OutOfMemoryError)
        del info
        for parameter, entries in optimizer.state.items():
            assert all(entries[key] is state[parameter][key] for key in entries)
        assert driver.used(dev.index) == used


def test_an_optimizer_is_put_back_when_something_later_fails(
    dev: torch.device, driver: Driver
) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    tensors = sum(1 + (p.grad is not None) for p in model.parameters())

    driver.fail_after(tensors + 8 + 1)
    with pytest.raises(MoveError, match=r"batch\['x'\] could not be moved"):
        move({"model": model, "optimizer": optimizer, "x": torch.ones(2)}, dev)

    assert {p.device for p in model.parameters()} == {CPU}
    assert state_devices(optimizer) == {CPU}
    step(model, optimizer)


@pytest.mark.machine("mps")
def test_state_is_downcast_with_its_parameters(dev: torch.device) -> None:
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4).double()).sum().backward()
    optimizer.step()

    move([model, optimizer], dev, downcast=True)

    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {torch.float32}
    assert state_devices(optimizer) == {dev}


def test_a_container_that_fails_in_the_state_is_named_with_its_cause(dev: torch.device) -> None:
    class Unhashable(tuple):
        fails = False

        def __hash__(self) -> int:
            if Unhashable.fails:
                msg = "no hash now"
                raise ValueError(msg)
            return 1

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["s"] = {Unhashable([torch.ones(1)])}
    Unhashable.fails = True

    with pytest.raises(MoveError, match=r"state\[0\]\['s'\].* no hash now"):
        move([model, optimizer], dev)

    assert model.weight.device.type == "cpu"


class Moments:
    """What an optimizer of somebody else keeps for a parameter."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class MovingMoments(Moments):
    def to(self, device: torch.device) -> MovingMoments:
        return MovingMoments(self.x.to(device))


def with_state(dev: torch.device, state: object) -> Optimizer:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["moments"] = state
    move(model, dev)
    return optimizer


@pytest.mark.accelerator
def test_state_with_a_to_of_its_own_is_sent_by_it(dev: torch.device) -> None:
    moments = MovingMoments(torch.ones(1))
    optimizer = with_state(dev, [moments])

    move(optimizer)

    (moved,) = next(iter(optimizer.state.values()))["moments"]
    assert moved.x.device == dev
    assert moments.x.device == CPU


@pytest.mark.accelerator
def test_state_of_an_unknown_type_is_named(dev: torch.device) -> None:
    optimizer = with_state(dev, [Moments(torch.ones(1))])

    with pytest.warns(UserWarning, match=r"^optimizer\.state\[0\]\['moments'\]\[0\] holds") as seen:
        move([optimizer], CPU)
    with pytest.raises(MoveError, match="does not know the type") as caught:
        move(optimizer, strict=True)

    assert seen[0].filename == __file__
    assert caught.value.path == "optimizer.state[0]['moments'][0]"
