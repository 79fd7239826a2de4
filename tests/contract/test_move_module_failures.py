"""A move of a module that fails half way is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from devicekit import MoveError, move

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_accelerator.driver import Driver

CPU = torch.device("cpu")


def model(device: torch.device = CPU) -> nn.Sequential:
    """Four parameters with gradients, three buffers and a weight that is tied."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    module[2].weight = module[0].weight
    module(torch.randn(3, 4)).sum().backward()
    return module.to(device) if device == CPU else move(module, device)


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters, their gradients and the buffers."""
    parameters = list(module.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    return [*parameters, *grads, *module.buffers()]


class Snapshot:
    """What a module is, to tell whether it is still that."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tensors = tensors_of(module)
        self.state = [(t.device, t.detach().to("cpu", copy=True)) for t in self.tensors]

    def check(self) -> None:
        """Fail where the module is no longer what it was."""
        now = tensors_of(self.module)
        assert all(new is old for new, old in zip(now, self.tensors, strict=True))
        for tensor, (device, value) in zip(now, self.state, strict=True):
            assert tensor.device == device
            assert torch.equal(tensor.detach().cpu(), value)


def fail_everywhere(
    module: nn.Module, target: torch.device, driver: Driver, at: Any = "allocation"
) -> int:
    """Let each step of a move fail in its turn, check that it is undone; return how many it has."""
    before = Snapshot(module)
    used = [driver.used(index) for index in range(driver.devices)]
    for n in range(1, 100):
        driver.fail_after(n, at)
        failure = failure_of(module, target)
        if failure is None:
            return n - 1
        message, cause, device = failure
        assert "and is where it was" in message
        assert isinstance(cause, torch.OutOfMemoryError)
        assert device == target
        before.check()
        assert [driver.used(index) for index in range(driver.devices)] == used
    pytest.fail("the move never succeeded")


def failure_of(
    module: nn.Module, target: torch.device
) -> tuple[str, BaseException | None, torch.device | None] | None:
    """Return what the error of a move says, its cause and its target; None if it succeeds."""
    try:
        move(module, target)
    except MoveError as error:
        cause = error.__cause__
        # Not with its traceback, whose frames hold what was copied last.
        return str(error), cause and cause.with_traceback(None), error.target
    return None


# Half way


@pytest.mark.parametrize("at", ["allocation", "copy"])
def test_a_move_that_fails_anywhere_is_undone(at: str, dev: torch.device, driver: Driver) -> None:
    module = model()

    steps = fail_everywhere(module, dev, driver, at)

    assert steps == len(tensors_of(module))
    assert {t.device for t in tensors_of(module)} == {dev}


def test_so_is_one_between_two_devices(
    dev: torch.device, dev1: torch.device, driver: Driver
) -> None:
    module = model(dev)

    assert fail_everywhere(module, dev1, driver) == len(tensors_of(module))


def test_so_is_one_that_goes_home(dev: torch.device, driver: Driver) -> None:
    module = model(dev)

    assert fail_everywhere(module, CPU, driver, "copy") == len(tensors_of(module))


def test_a_split_module_is_split_again(
    dev: torch.device, dev1: torch.device, driver: Driver
) -> None:
    module = nn.Sequential(model(), model(dev), model(dev1))

    fail_everywhere(module, dev1, driver)

    assert {t.device for t in tensors_of(module)} == {dev1}


@pytest.mark.parametrize(
    ("make", "error_at"),
    [
        pytest.param(lambda: nn.LSTM(4, 3), 2, id="lstm"),
        pytest.param(lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), 2, id="spectral norm"),
        pytest.param(nn.LazyBatchNorm1d, 1, id="lazy"),
    ],
)
def test_what_is_undone_works(
    make: Callable[[], nn.Module], error_at: int, dev: torch.device, driver: Driver
) -> None:
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(0)
    twin = make()

    driver.fail_after(error_at)
    with pytest.raises(MoveError, match="out of memory"):
        move(module, dev)

    got, want = module(x := torch.ones(3, 4)), twin(x)
    got, want = (y[0] if isinstance(y, tuple) else y for y in (got, want))
    assert torch.allclose(got, want)


def test_what_a_module_moves_by_itself_is_undone(dev: torch.device, driver: Driver) -> None:
    class Metric(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.total, self.defaults = torch.zeros(3), {"total": torch.zeros(3)}

        def _apply(self, fn: Any, recurse: bool = True) -> Metric:
            super()._apply(fn, recurse)
            self.total = fn(self.total)
            self.defaults["total"] = fn(self.defaults["total"])
            return self

    module = Metric()
    total, default = module.total, module.defaults["total"]

    steps = fail_everywhere(module, dev, driver)

    assert steps == 4
    assert total.device == default.device == CPU
    assert module.total.device == module.defaults["total"].device == dev


class Interrupt(TorchFunctionMode):
    """Let the user press Ctrl-C at the n-th copy to a device."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and args[1:] and args[1] != args[0].device:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return func(*args, **kwargs or {})


@pytest.mark.driver
def test_an_interrupted_move_is_undone(dev: torch.device) -> None:
    module = model()
    before = Snapshot(module)

    for n in range(1, len(before.tensors) + 1):
        with Interrupt(n), pytest.raises(KeyboardInterrupt):
            move(module, dev)

        before.check()


def test_a_module_that_leaves_something_behind_is_put_back(dev: torch.device) -> None:
    class Stubborn(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Stubborn:
            self.bias = nn.Parameter(self.bias.detach().cpu())
            return self

    module = Stubborn(2, 2)
    before = Snapshot(module)

    with pytest.raises(MoveError, match="left bias on cpu behind") as info:
        move(module, dev)

    assert info.value.path == "bias"
    before.check()


def test_the_error_of_a_to_of_its_own_is_the_cause(dev: torch.device) -> None:
    class Broken(nn.Linear):
        def to(self, *_args: object, **_options: object) -> Any:
            msg = "not today"
            raise NotImplementedError(msg)

    module = Broken(2, 2)
    before = Snapshot(module)

    with pytest.raises(MoveError, match="and is where it was: not today") as info:
        move({"net": module}, dev)

    assert isinstance(info.value.__cause__, NotImplementedError)
    assert info.value.path == "batch['net']"
    before.check()


def test_earlier_modules_of_a_structure_are_put_back(dev: torch.device, driver: Driver) -> None:
    first, second = model(), model()
    before = Snapshot(first), Snapshot(second)

    driver.fail_after(len(before[0].tensors) + 3)
    with pytest.raises(MoveError, match="out of memory") as info:
        move({"nets": [first, second]}, dev)

    assert info.value.path == "batch['nets'][1]"
    for snapshot in before:
        snapshot.check()


def test_without_memory_to_go_back_to_the_error_says_what_is_where(
    dev: torch.device, dev1: torch.device, driver: Driver
) -> None:
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    move(module, dev)
    values = [p.detach().cpu().clone() for p in module.parameters()]

    driver.fail_after(3, times=2)  # the last one does not arrive, the second cannot go back
    with pytest.raises(MoveError, match=r"no memory to put 1\.weight back") as info:
        move(module, dev1)

    assert info.value.path == "1.weight"
    assert [p.device for p in module.parameters()] == [dev, dev1, dev]
    assert all(torch.equal(p.cpu(), v) for p, v in zip(module.parameters(), values, strict=True))


def test_a_move_to_meta_that_fails_keeps_the_values() -> None:
    class Broken(nn.Linear):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            msg = "not today"
            raise RuntimeError(msg)

    module = Broken(2, 2)
    before = Snapshot(module)

    with pytest.raises(MoveError, match="not today"):
        move(module, "meta")

    before.check()


# Memory


def test_the_peak_is_that_of_the_module(
    dev: torch.device, dev1: torch.device, driver: Driver
) -> None:
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    one = module[0].weight.nbytes

    move(module, dev)

    assert driver.peak(dev.index) == driver.used(dev.index) == 8 * one
    driver.reset_counters()
    move(module, dev1)
    assert driver.peak(dev.index) == 8 * one
    assert driver.used(dev.index) == 0
    assert driver.peak(dev1.index) == 8 * one
    move(module, CPU)


def test_memory_is_given_back_on_the_way(
    dev: torch.device, dev1: torch.device, driver: Driver
) -> None:
    module = move(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))), dev)
    one = module[0].weight.nbytes
    on_both: list[int] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **kwargs or {})
            on_both.append(driver.used(dev.index) + driver.used(dev1.index))
            return result

    with Watch():
        move(module, dev1)

    assert max(on_both) == 9 * one
    move(module, CPU)


def test_moving_twice_copies_once(dev: torch.device, driver: Driver) -> None:
    module = model()

    with driver.counting() as first:
        move(module, dev)
    with driver.counting() as second:
        move(module, dev)

    assert first["h2d"] == len(tensors_of(module))
    assert not any(second.values())


@pytest.mark.machine("mps")
def test_a_downcast_that_fails_is_undone(dev: torch.device, driver: Driver) -> None:
    module = nn.Linear(4, 4).double()
    module(torch.ones(1, 4).double()).sum().backward()
    before = Snapshot(module)

    for n in range(1, 5):
        driver.fail_after(n)
        with pytest.raises(MoveError, match="out of memory"):
            move(module, dev, downcast=True)

        before.check()
        assert module.weight.dtype == torch.float64


def test_parameters_of_the_same_memory_are_it_again(dev: torch.device, driver: Driver) -> None:
    module = nn.ParameterList([torch.ones(3), torch.ones(2)])
    module.append(nn.Parameter(module[0].data))
    module.append(nn.Parameter(module[1].data))

    steps = fail_everywhere(module, dev, driver)

    assert steps >= 2
    for first, second in ((0, 2), (1, 3)):
        storages = [module[i].untyped_storage()._cdata for i in (first, second)]
        assert storages[0] == storages[1]
