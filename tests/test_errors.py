"""Errors: what they are to Python and torch, how they travel, and every word they say."""

from __future__ import annotations

import concurrent.futures
import copy
import multiprocessing
import pickle
import typing
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from fakebox import CUDA_UNKNOWN_ERROR, GPU, FakeBox
from torch._utils import ExceptionWrapper

import devicekit
import devicekit.errors
from devicekit import DeviceInfo
from devicekit._backends import host, this_machine
from devicekit._device.checking import _FOUND
from devicekit._types import Reason
from devicekit.testing import fake_devices

CUDA1 = torch.device("cuda:1")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test meets another machine in this process: nothing found or decided is kept."""
    this_machine().decisions.clear()
    _FOUND.clear()
    yield
    this_machine().decisions.clear()
    _FOUND.clear()


# ---- what they are -------------------------------------------------------------------------------

BASES = {
    devicekit.DeviceError: (Exception,),
    devicekit.InvalidDeviceError: (ValueError, RuntimeError),
    devicekit.DeviceUnavailableError: (RuntimeError,),
    devicekit.DeviceMismatchError: (RuntimeError,),
    devicekit.NoDeviceError: (LookupError,),
    devicekit.MoveError: (RuntimeError,),
}

EXAMPLES = [
    devicekit.DeviceError("text"),
    devicekit.InvalidDeviceError("text"),
    devicekit.DeviceUnavailableError(
        "text", requested="cuda:1", available=(CPU,), reason="index out of range"
    ),
    devicekit.DeviceMismatchError("text", devices=(CPU, CUDA1), paths=("mask",)),
    devicekit.NoDeviceError("text"),
    devicekit.MoveError("text", path="batch[0]", target=CUDA1),
]
by_class = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


def test_every_error_is_listed() -> None:
    assert {cls.__name__ for cls in BASES} == set(devicekit.errors.__all__)
    assert devicekit.errors.__all__ == sorted(devicekit.errors.__all__)
    assert set(devicekit.errors.__all__) <= set(devicekit.__all__)
    assert [type(error) for error in EXAMPLES] == list(BASES)


@by_class
def test_builtin_bases(error: devicekit.DeviceError) -> None:
    assert isinstance(error, devicekit.DeviceError)
    for base in BASES[type(error)]:
        assert isinstance(error, base)
        with pytest.raises(base, match=r"^text$"):
            raise error


def test_no_error_is_caught_as_another() -> None:
    for error in EXAMPLES[1:]:
        caught = [cls for cls in list(BASES)[1:] if isinstance(error, cls)]
        assert caught == [type(error)]


@pytest.mark.parametrize("cls", BASES, ids=lambda cls: cls.__name__)
def test_a_message_is_enough_and_not_even_needed(cls: type[devicekit.DeviceError]) -> None:
    assert str(cls("text")) == "text"
    assert cls("text").args == ("text",)
    assert str(cls()) == ""


@pytest.mark.parametrize("cls", BASES, ids=lambda cls: cls.__name__)
def test_attributes_are_keywords(cls: type[devicekit.DeviceError]) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        cls("text", "more")  # type: ignore[call-arg]


def test_defaults() -> None:
    unavailable = devicekit.DeviceUnavailableError("text")
    mismatch = devicekit.DeviceMismatchError("text")
    move = devicekit.MoveError("text")

    assert (unavailable.requested, unavailable.available, unavailable.reason) == (None, (), None)
    assert (mismatch.devices, mismatch.paths) == ((), ())
    assert (move.path, move.target) == (None, None)


# ---- how they travel -----------------------------------------------------------------------------


def same(one: Exception, other: Exception) -> bool:
    return (type(one), one.args, vars(one)) == (type(other), other.args, vars(other))


@by_class
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_everything(error: devicekit.DeviceError, protocol: int) -> None:
    assert same(pickle.loads(pickle.dumps(error, protocol)), error)


@by_class
def test_copies_keep_everything(error: devicekit.DeviceError) -> None:
    assert same(copy.copy(error), error)
    assert same(copy.deepcopy(error), error)


@by_class
def test_workers_of_torch_raise_the_same_class(error: devicekit.DeviceError) -> None:
    try:
        raise error
    except devicekit.DeviceError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")

    with pytest.raises(type(error), match="in DataLoader worker process 0") as caught:
        wrapper.reraise()
    assert type(caught.value) is type(error)
    assert "text" in str(caught.value)


def fail(spec: str) -> None:
    with fake_devices(cuda=1):
        devicekit.device(spec)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_pool_raises_the_same_error() -> None:
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        future = pool.submit(fail, "cuda:1")
        with pytest.raises(devicekit.DeviceUnavailableError, match="sees 1 CUDA device") as caught:
            future.result(timeout=60)

    assert caught.value.requested == "cuda:1"
    assert caught.value.available == (torch.device("cuda:0"), CPU)
    assert caught.value.reason == "index out of range"


def test_errors_are_caught_as_those_of_torch() -> None:
    for spec in ("cuda0", -1, "gpu"):
        with pytest.raises(RuntimeError, match="is not a device"):
            devicekit.device(spec)
    with pytest.raises(ValueError, match="is not a device"):
        devicekit.device("cuda0")
    with fake_devices(), pytest.raises(RuntimeError, match="is not available"):
        devicekit.device("cuda")


# ---- every word of device() and auto() -----------------------------------------------------------

PAIR = [GPU(name="A"), GPU(name="B")]
VERSION = "2.99.0"

INVALID = [
    ("gpu", "'gpu' is not a device: expected the kind of GPU. Write 'cuda' for one of NVIDIA or "
            "AMD, 'xpu' for Intel, 'mps' for Apple, or call devicekit.auto()."),
    ("cuda0", "'cuda0' is not a device. Did you mean 'cuda:0'?"),
    ("banana", "'banana' is not a device: expected 'cpu', 'cuda', 'xpu', 'mps' or 'meta', with an "
               "index where there are several ('cuda:1'), or 'auto'. Call devicekit.devices() for "
               "those that are here."),
    ("cuda:0,1", "'cuda:0,1' is not a device but several: expected one, such as 'cuda:0'."),
    ("GPU-a", "'GPU-a' is not a device but the UUID of one: expected its number, such as in "
              "'cuda:0'. Set CUDA_VISIBLE_DEVICES to the UUID before the program starts, and write "
              "'cuda'."),
    ("cuda:-1", "'cuda:-1' is not a device: indices start at 0. Write 'cpu' for the CPU, or call "
                "devicekit.auto()."),
    (-1, "-1 is not a device: indices start at 0. Write 'cpu' for the CPU, or call "
         "devicekit.auto()."),
    (None, "None is not a device: expected a text such as 'cuda:0', the index of an accelerator, "
           "or a torch.device. Call devicekit.auto() for the best device here."),
    (True, "True is not a device but of type bool: expected a text such as 'cuda:0', the index of "
           "an accelerator, or a torch.device."),
    (b"cpu", "b'cpu' is not a device but of type bytes: expected a text such as 'cuda:0', the "
             "index of an accelerator, or a torch.device. Did you mean 'cpu'?"),
    (torch.device("cuda:128"), f"{torch.device('cuda:128')!r} is not a device: torch keeps "
     "indices from 0 to 127, so the number it was made from is lost. Pass the text to "
     "devicekit.device() instead."),
]  # fmt: skip

UNAVAILABLE = [
    pytest.param(
        FakeBox(built="cpu"),
        "cuda:10",
        "'cuda:10' is not available: this build of torch (2.99.0) has no CUDA. Here: "
        "cpu (CPU). Install a build of torch with CUDA, or call devicekit.auto().",
        id="cpu-build",
    ),
    pytest.param(
        FakeBox(built="cpu"),
        3,
        "3 is not available: an index means a device of the current accelerator, and "
        "this build of torch (2.99.0) has none. Here: cpu. Write 'cpu', or call "
        "devicekit.auto().",
        id="int-without-accelerator",
    ),
    pytest.param(
        FakeBox(built="cpu"),
        "mps",
        "'mps' is not available: this build of torch (2.99.0) has no MPS, which is for "
        "the GPUs of Apple. Here: cpu (CPU). On a Mac, install a build of torch for "
        "macOS; elsewhere call devicekit.auto().",
        id="mps-elsewhere",
    ),
    pytest.param(
        FakeBox(built="cpu"),
        "opencl",
        "'opencl' is not available: torch has no more than the name of this type, and "
        "no device of it in any release. Here: cpu (CPU). Call devicekit.auto() for "
        "the best device here.",
        id="unused-type",
    ),
    pytest.param(
        FakeBox(built="cpu"),
        "cpu:1",
        "'cpu:1' is not available: there is one cpu device, and it has no number. Write 'cpu'.",
        id="cpu-with-index",
    ),
    pytest.param(
        FakeBox(built="cpu"),
        "npu",
        "'npu' is not available: the plugin torch_npu is not imported. Here: cpu "
        "(CPU). Install and import torch_npu first.",
        id="plugin",
    ),
    pytest.param(
        FakeBox(built="cpu"),
        "privateuseone",
        "'privateuseone' is not available: the plugin for privateuseone is not "
        "imported. Here: cpu (CPU). Install and import its package first.",
        id="privateuse1",
    ),
    pytest.param(
        FakeBox(plugin=[GPU()], plugin_module=False),
        "privateuseone",
        "'privateuseone' is not available: privateuseone did not start "
        "(torch.privateuseone does not exist: the plugin registered no device "
        "module). Here: cpu (CPU). Run 'python -m devicekit' for the diagnosis.",
        id="plugin-without-module",
    ),
    pytest.param(
        FakeBox(),
        "cuda",
        "'cuda' is not available: this machine has no NVIDIA driver, or this process "
        "cannot reach it (Found no NVIDIA driver on your system). Here: cpu (CPU). "
        "Install the driver (in a container: start it with its GPUs), or call "
        "devicekit.auto().",
        id="no-driver",
    ),
    pytest.param(
        FakeBox(PAIR, driver_cuda="11.4"),
        "cuda",
        "'cuda' is not available: the driver is too old for this build of torch (CUDA"
        " 12.8) (CUDA initialization: The NVIDIA driver on your system is too old "
        "(found version 11040)). Here: cpu (CPU). Update the driver, or install a "
        "build of torch for an older CUDA.",
        id="old-driver",
    ),
    pytest.param(
        FakeBox(PAIR, init_error=CUDA_UNKNOWN_ERROR),
        "cuda",
        "'cuda' is not available: CUDA did not start (CUDA initialization: CUDA "
        "unknown error - this may be due to an incorrectly set up environment, e.g. "
        "changing env variable CUDA_VISIBLE_DEVICES after program start. Setting the "
        "available devices to be zero). Here: cpu (CPU). Run 'python -m devicekit' "
        "for the diagnosis.",
        id="driver-failed",
    ),
    pytest.param(
        FakeBox(PAIR, init_error=CUDA_UNKNOWN_ERROR, env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
        "cuda:1",
        "'cuda:1' is not available: CUDA counts this device and does not start. Here:"
        " cpu (CPU). Run 'python -m devicekit' for the diagnosis.",
        id="counted-and-does-not-start",
    ),
    pytest.param(
        FakeBox(driver_installed=True, pynvml=True),
        "cuda",
        "'cuda' is not available: the driver sees no CUDA device (No CUDA GPUs are "
        "available). Here: cpu (CPU). Run 'python -m devicekit' for the diagnosis, or"
        " call devicekit.auto().",
        id="none-visible",
    ),
    pytest.param(
        FakeBox([GPU(name="A")], pynvml=True),
        "cuda:1",
        "'cuda:1' is not available: this process sees 1 CUDA device, numbered from 0."
        " Here: cuda:0 (A), cpu (CPU). Use an index below 1.",
        id="out-of-range",
    ),
    pytest.param(
        FakeBox(PAIR, pynvml=True),
        "cuda:256",
        "'cuda:256' is not available: this process sees 2 CUDA devices, numbered from"
        " 0. Here: cuda:0 (A), cuda:1 (B), cpu (CPU). Use an index below 2.",
        id="out-of-eight-bits",
    ),
    pytest.param(
        FakeBox(PAIR, env={"CUDA_VISIBLE_DEVICES": "0"}),
        "cuda:1",
        "'cuda:1' is not available: this process sees 1 CUDA device, numbered from 0 "
        "(CUDA_VISIBLE_DEVICES='0'). Here: cuda:0 (A), cpu (CPU). Use an index below "
        "1, or change CUDA_VISIBLE_DEVICES before the program starts.",
        id="perhaps-hidden",
    ),
    pytest.param(
        FakeBox(PAIR, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "0"}),
        "cuda:1",
        "'cuda:1' is not available: this process sees 1 CUDA device, numbered from 0,"
        " because of CUDA_VISIBLE_DEVICES='0'. Here: cuda:0 (A), cpu (CPU). Change "
        "CUDA_VISIBLE_DEVICES before the program starts, or unset it.",
        id="hidden",
    ),
    pytest.param(
        FakeBox(PAIR, pynvml=True, env={"CUDA_VISIBLE_DEVICES": ""}),
        "cuda",
        "'cuda' is not available: CUDA_VISIBLE_DEVICES='' leaves no CUDA device "
        "visible. Here: cpu (CPU). Change CUDA_VISIBLE_DEVICES before the program "
        "starts, or unset it.",
        id="all-hidden",
    ),
    pytest.param(
        FakeBox(PAIR, built="rocm", env={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}),
        "cuda",
        "'cuda' is not available: ROCR_VISIBLE_DEVICES='1' and "
        "HIP_VISIBLE_DEVICES='1' leave no ROCm device visible. Here: cpu (CPU). "
        "Change ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES before the program "
        "starts, or unset them.",
        id="hidden-twice",
    ),
    pytest.param(
        FakeBox([GPU(name="Old", capability=(5, 0))], pynvml=True, arch_list="sm_75 sm_90"),
        "cuda",
        "'cuda' is not available: Old has compute capability 5.0, and this build of "
        "torch has kernels for sm_75 sm_90 only. Here: cpu (CPU). Install a build of "
        "torch for this GPU, or call devicekit.auto().",
        id="architecture",
    ),
    pytest.param(
        FakeBox([GPU(name="Old", arch="gfx803")], built="rocm", arch_list="gfx942"),
        "cuda",
        "'cuda' is not available: Old has another architecture, and this build of "
        "torch has kernels for gfx942 only. Here: cpu (CPU). Install a build of torch"
        " for this GPU, or call devicekit.auto().",
        id="rocm-architecture",
    ),
    pytest.param(
        FakeBox(built="rocm", init_error="Found no NVIDIA driver on your system."),
        "cuda",
        "'cuda' is not available: this machine has no AMD driver, or this process "
        "cannot reach it (CUDA initialization: Found no NVIDIA driver on your "
        "system). Here: cpu (CPU). Install the driver (in a container: start it with "
        "its GPUs), or call devicekit.auto().",
        id="rocm-no-driver",
    ),
    pytest.param(
        FakeBox(mps=True),
        "cuda",
        "'cuda' is not available: this build of torch (2.99.0) has no CUDA. Here: "
        "mps:0 (MPS device), cpu (CPU). Install a build of torch with CUDA, or call "
        "devicekit.auto().",
        id="on-a-mac",
    ),
    pytest.param(
        FakeBox(mps=False),
        "mps",
        "'mps' is not available: the driver sees no MPS device. Here: cpu (CPU). Run "
        "'python -m devicekit' for the diagnosis, or call devicekit.auto().",
        id="no-mps",
    ),
]

AUTO: list[Any] = [
    pytest.param(
        {"cuda": 2, "environ": {"DEVICEKIT_DEVICE": "gpu1"}},
        {},
        "The environment variable DEVICEKIT_DEVICE is set to 'gpu1'. 'gpu1' is not a "
        "device. Did you mean 'cuda:1'? Unset it to let auto() choose.",
        id="bad-variable",
    ),
    pytest.param(
        {"cuda": 1, "names": "A", "environ": {"DEVICEKIT_DEVICE": "cuda:1"}},
        {},
        "The environment variable DEVICEKIT_DEVICE is set to 'cuda:1'. 'cuda:1' is "
        "not available: this process sees 1 CUDA device, numbered from 0. Here: "
        "cuda:0 (A), cpu (CPU). Use an index below 1. Unset it to let auto() choose.",
        id="variable-not-here",
    ),
    pytest.param(
        {"cuda": 2, "environ": {"LOCAL_RANK": "one"}},
        {},
        "The environment variable LOCAL_RANK is 'one': expected the rank of this "
        "process on its machine, a whole number from 0 on. Unset it where no launcher"
        " is used.",
        id="malformed-rank",
    ),
    pytest.param(
        {"cuda": 2, "environ": {"SLURM_LOCALID": "2"}},
        {},
        "SLURM_LOCALID is 2, but this process sees 2 cuda devices, numbered from 0. "
        "Start at most 2 processes on this machine.",
        id="rank-out-of-range",
    ),
    pytest.param(
        {"cuda": 4, "environ": {"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}},
        {},
        "LOCAL_RANK is 2, but this process sees 2 cuda devices, numbered from 0 "
        "(CUDA_VISIBLE_DEVICES='0,1'). Start at most 2 processes on this machine.",
        id="rank-and-visibility",
    ),
    pytest.param(
        {"cuda": 2, "capability": [(9, 0), (5, 0)], "environ": {"LOCAL_RANK": "1"}},
        {},
        "LOCAL_RANK is 1, but cuda:1 cannot be used (architecture not in this build). "
        "Start at most 1 process on this machine, and leave cuda:1 out of "
        "CUDA_VISIBLE_DEVICES.",
        id="rank-on-unusable",
    ),
    pytest.param(
        {"cuda": 2, "free_memory": ["9GiB", "1GiB"], "environ": {"LOCAL_RANK": "1"}},
        {"min_free": "2GiB"},
        "LOCAL_RANK is 1, but cuda:1 cannot be used (1.0 GiB free of the 2.0 GiB "
        "wanted). Start at most 1 process on this machine, and leave cuda:1 out of "
        "CUDA_VISIBLE_DEVICES.",
        id="rank-without-memory",
    ),
    pytest.param(
        {"cuda": 1},
        {"prefer": "gpu"},
        "'gpu' is not a device type: expected a name such as 'cuda', 'xpu', 'mps' or "
        "'cpu', without an index.",
        id="bad-preference",
    ),
    pytest.param(
        {"cuda": 1},
        {"min_free": "much"},
        "'much' is not an amount of memory: expected a number of bytes, or a text "
        "such as '8GiB' or '500MB'.",
        id="bad-size",
    ),
]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of torch and a CPU that the texts can name."""
    monkeypatch.setattr(torch, "__version__", VERSION)
    monkeypatch.setattr(host, "read", lambda: DeviceInfo(device=CPU, name="CPU"))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("spec", "text"), INVALID, ids=lambda value: ascii(value)[:20])
def test_what_device_says_of_no_device(spec: Any, text: str) -> None:
    with pytest.raises(devicekit.InvalidDeviceError, match="is not a device") as caught:
        devicekit.device(spec)

    assert str(caught.value) == text


@pytest.mark.usefixtures("plain")
def test_what_device_says_of_a_bare_number_where_there_is_no_accelerator() -> None:
    with (
        FakeBox(built="cpu"),
        pytest.raises(devicekit.InvalidDeviceError, match="is not a device") as caught,
    ):
        devicekit.device("0")

    assert str(caught.value) == (
        "'0' is not a device: expected a type before the index, and this build of torch (2.99.0) "
        "has no accelerator. Write 'cpu', or call devicekit.auto()."
    )


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("box", "spec", "text"), UNAVAILABLE)
def test_what_device_says_of_one_that_is_not_here(box: FakeBox, spec: Any, text: str) -> None:
    with box, pytest.raises(devicekit.DeviceUnavailableError, match="not available") as caught:
        devicekit.device(spec)

    assert str(caught.value) == text
    assert caught.value.reason in typing.get_args(Reason)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("machine", "options", "text"), AUTO)
def test_what_auto_says(machine: dict[str, Any], options: dict[str, Any], text: str) -> None:
    with (
        fake_devices(**machine),
        pytest.raises(ValueError if "amount" in text else RuntimeError, match="is ") as caught,
    ):
        devicekit.auto(**options)

    assert str(caught.value) == text


@pytest.mark.usefixtures("plain")
def test_what_a_forked_process_is_told() -> None:
    with (
        FakeBox(PAIR),
        mock.patch.object(torch.cuda, "_is_in_bad_fork", return_value=True),
        pytest.raises(devicekit.DeviceUnavailableError, match="forked") as caught,
    ):
        devicekit.device("cuda:1")

    assert caught.value.reason == "forked after start"
    assert str(caught.value) == (
        "'cuda:1' is not available: this process was forked from one that had started CUDA, and "
        "cannot use it. Here: cpu (CPU). In a DataLoader worker, return CPU tensors and call "
        "move() in the loop; start other processes by 'spawn'."
    )


def test_every_reason_is_met() -> None:
    """ "busy" is no reason to refuse a device; a forked process has a test of its own."""
    met = set()
    for param in UNAVAILABLE:
        box, spec, _ = param.values
        _FOUND.clear()
        with box, pytest.raises(devicekit.DeviceUnavailableError, match="not available") as caught:
            devicekit.device(spec)
        met.add(caught.value.reason)

    assert met == {*typing.get_args(Reason)} - {"busy", "forked after start"}
