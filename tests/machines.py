"""The machine that this test process runs on, and what its tests may ask of it.

`DEVICEKIT_TEST_MACHINE` chooses it: `cpu` (the default), a fake one (`cuda`, `plugin`, `mps`,
`xpu`; see fake_accelerator/), or `real` for the accelerator that is here. Tests take their devices
from the fixtures `dev` and `dev1`, never from a literal, so that one file runs on every machine.

Tests that need an accelerator have the mark `accelerator`, by themselves or because they ask for
one of these fixtures: `pytest -m accelerator` runs them on the real one where the variable is not
set, and skips them where there is none.

conftest.py calls `install` before anything imports torch, and registers this module as a plugin.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import torch
    from fake_accelerator.driver import Driver

__all__ = ["DEVICES", "FAKE", "MACHINE", "install"]

FAKES = ("cuda", "mps", "plugin", "xpu")
MACHINE = os.environ.get("DEVICEKIT_TEST_MACHINE", "cpu")
FAKE = MACHINE in FAKES
# Machines on which only tests that name them run: the rest of the contract is the same.
SPECIAL = ("mps", "xpu")
DEVICES: list[torch.device] = []
# Backends whose `Module.to` gives its Parameters other memory, and does not replace them.
INPLACE = ("cuda", "mps", "xpu")

_PASSED = pytest.StashKey[bool]()
_driver: list[Driver] = []


def install() -> None:
    """Make the machine. Must come before the first import of torch in this process."""
    if MACHINE not in ("cpu", "real", *FAKES):
        msg = f"DEVICEKIT_TEST_MACHINE is {MACHINE!r}: expected cpu, real, or {', '.join(FAKES)}."
        raise pytest.UsageError(msg)
    if FAKE:
        _driver.append(importlib.import_module(f"fake_accelerator.{MACHINE}").install())
    if MACHINE == "cpu":
        return
    DEVICES.extend(_devices_here())
    if not DEVICES:
        msg = f"there is no accelerator on the machine {MACHINE!r}"
        raise pytest.UsageError(msg)


def _devices_here() -> list[torch.device]:
    import torch  # not before the fake is in place

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator else 0
    return [torch.device(accelerator.type, index) for index in range(count)] if accelerator else []


def pytest_configure(config: pytest.Config) -> None:
    global MACHINE  # noqa: PLW0603  # asked for on the command line, which is read after `install`
    if config.option.markexpr == "accelerator" and "DEVICEKIT_TEST_MACHINE" not in os.environ:
        DEVICES.extend(_devices_here())
        MACHINE = "real" if DEVICES else MACHINE
    for line in (
        "accelerator(n=1): needs n accelerator devices, real or fake (asking for dev or dev1 does)",
        "driver: needs a fake driver (asking for the fixture does)",
        "inplace_move: needs Module.to to keep its Parameter objects, as towards CUDA",
        "machine(*names): for these values of DEVICEKIT_TEST_MACHINE only",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        asks = {"dev", "dev1"} & set(getattr(item, "fixturenames", ()))
        if asks and item.get_closest_marker("accelerator") is None:
            item.add_marker("accelerator")


def pytest_report_header() -> str:
    devices = ", ".join(map(str, DEVICES)) or "no accelerator"
    return f"machine: {MACHINE} ({devices})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := _reason_to_skip(item):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def dev() -> torch.device:
    """The first accelerator."""
    return DEVICES[0]


@pytest.fixture
def dev1() -> torch.device:
    """The second accelerator."""
    return DEVICES[1]


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """The fake driver: counters at zero, settings undone afterwards, and nothing left behind."""
    fake = _driver[0]
    before = _used(fake)
    fake.reset_counters()
    yield fake
    fake.reset()
    # A failed test leaves its tensors in the traceback.
    if request.node.stash.get(_PASSED, False):
        assert _used(fake) == before, "the test left memory on a device"


def _used(fake: Driver) -> list[int]:
    gc.collect()
    return [fake.used(index) for index in range(fake.devices)]


def _reason_to_skip(item: pytest.Item) -> str | None:
    names = [name for mark in item.iter_markers("machine") for name in mark.args]
    # On a real accelerator, what was written for the fake of its type holds too.
    here = {MACHINE, DEVICES[0].type} if MACHINE == "real" else {MACHINE}
    if names and here.isdisjoint(names):
        return f"for the machine {' or '.join(names)}, this is {MACHINE}"
    if MACHINE in SPECIAL and not names:
        return f"runs on other machines than {MACHINE}"
    fixtures = getattr(item, "fixturenames", ())
    needed = max(_marked_devices(item), 1 * ("dev" in fixtures), 2 * ("dev1" in fixtures))
    if needed > len(DEVICES):
        return f"needs {needed} accelerator(s), the machine {MACHINE} has {len(DEVICES)}"
    if not FAKE and ("driver" in fixtures or item.get_closest_marker("driver")):
        return f"needs a fake driver, the machine {MACHINE} has none"
    if item.get_closest_marker("inplace_move") and DEVICES and DEVICES[0].type not in INPLACE:
        return f"Module.to makes new Parameters on the machine {MACHINE}"
    return None


def _marked_devices(item: pytest.Item) -> int:
    mark = item.get_closest_marker("accelerator")
    if mark is None:
        return 0
    return int(mark.kwargs.get("n") or (mark.args[0] if mark.args else 1))
