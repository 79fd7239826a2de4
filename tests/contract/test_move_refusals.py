"""What does not fit, or has no place, is refused before anything moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import devicekit.testing
from devicekit import MoveError, move

if TYPE_CHECKING:
    from fake_accelerator.driver import Driver

CPU = torch.device("cpu")
KIB = 1 << 10


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def test_too_large_for_what_is_free(dev: torch.device, driver: Driver) -> None:
    driver.set_memory(dev.index, 64 * KIB, others=32 * KIB)
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    move(module, dev)  # 32 KiB: just fits
    move(module, CPU)
    module.register_buffer("mask", torch.ones(1))

    with (
        driver.counting() as counted,
        pytest.raises(
            MoveError, match=r"needs 32.0 KiB \(32772 bytes\), and 32.0 KiB \(32768\) are free"
        ) as info,
    ):
        move([module], dev)

    assert info.value.path == "batch[0]"
    assert info.value.target == dev
    assert counted["allocs"] == 0
    assert {t.device for t in tensors_of(module)} == {CPU}


def test_gradients_need_memory_too(dev: torch.device, driver: Driver) -> None:
    module = nn.Linear(64, 64, bias=False)
    module(torch.ones(1, 64)).sum().backward()
    driver.set_memory(dev.index, 24 * KIB)

    with pytest.raises(
        MoveError, match=r"32.0 KiB \(32768 bytes\), and 24.0 KiB \(24576\) are free"
    ):
        move(module, dev)

    assert module.weight.device == CPU


def test_what_is_there_already_needs_no_memory(dev: torch.device, driver: Driver) -> None:
    module = nn.Sequential(nn.Linear(64, 64, bias=False).to(dev), nn.Linear(8, 8, bias=False))
    driver.set_memory(dev.index, 40 * KIB)  # of which 16 are used

    move(module, dev)

    assert {t.device for t in tensors_of(module)} == {dev}


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_pretended_machine_refuses_what_is_too_large_for_it(kind: str) -> None:
    module = nn.Linear(64, 64, bias=False)

    with (
        devicekit.testing.fake_devices(**{kind: 1}, free_memory="8KiB"),
        pytest.raises(
            MoveError, match=r"16.0 KiB \(16384 bytes\), and 8.0 KiB \(8192\) are free there"
        ),
    ):
        move(module, f"{kind}:0")

    assert module.weight.device == CPU


@pytest.mark.machine("mps")
def test_mps_has_no_float64(dev: torch.device) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    values = module[1].weight.detach().clone()

    with pytest.raises(MoveError, match=r"1.weight is float64, which MPS.*downcast=True") as info:
        move(module, dev)

    assert info.value.path == "1.weight"
    assert {t.device for t in tensors_of(module)} == {CPU}
    weight = module[1].weight
    move(module, dev, downcast=True)
    assert module[1].weight is weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight.detach().cpu(), values.float())
