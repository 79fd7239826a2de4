"""device(): every way to write a device gives a canonical one, or the one error that is true."""

from __future__ import annotations

import enum
import os
import pickle
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fakebox import CUDA_UNKNOWN_ERROR, DRIVER_MISMATCH, GPU, FakeBox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import devicekit
from devicekit._backends import this_machine
from devicekit._device.checking import _FOUND, _found
from devicekit._device.spelling import UNUSED_TYPES, parse, shown
from devicekit.testing import fake_devices

PLUGIN = torch._C._get_privateuse1_backend_name()
PAIR = [GPU(name="A"), GPU(name="B")]
TWINS = [GPU(), GPU()]  # only CUDA knows the order of unequal GPUs
LONG = "9" * 5000


def rows(*table: tuple[Any, ...]) -> list[Any]:
    """Name each row after its values, and number those that look the same."""
    seen: dict[str, int] = {}
    named = []
    for row in table:
        values = [v for v in row if not isinstance(v, FakeBox)]
        name = ascii("-".join(f"{type(v).__name__} {shown(v)[:25]}" for v in values[:1]))
        seen[name] = seen.get(name, 0) + 1
        named.append(pytest.param(*row, id=f"{name[1:-1]}{seen[name] if seen[name] > 1 else ''}"))
    return named


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test meets another machine in this process: nothing found or decided is kept."""
    forget()
    yield
    forget()


def forget() -> None:
    this_machine().decisions.clear()
    _FOUND.clear()


def refusal(spec: Any) -> devicekit.DeviceUnavailableError:
    with pytest.raises(devicekit.DeviceUnavailableError, match="is not available") as caught:
        devicekit.device(spec)
    return caught.value


def names(error: devicekit.DeviceUnavailableError) -> list[str]:
    return [str(device) for device in error.available]


class Text(str):
    """A text that hashes and compares in a way of its own."""

    __slots__ = ()
    __hash__ = object.__hash__
    __str__ = str.upper

    def __eq__(self, other: object) -> bool:
        return self is other


class Kind(str, enum.Enum):
    CPU = "cpu"
    CUDA = "cuda:1"
    AUTO = "auto"


class Rank(enum.IntEnum):
    ONE = 1


class Count(int, enum.Enum):
    ONE = 1


class Index:
    def __index__(self) -> int:
        return 1


class Broken:
    """An object from which nothing can be had."""

    def __repr__(self) -> str:
        raise OSError

    __str__ = __repr__

    def __hash__(self) -> int:
        raise LookupError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __index__(self) -> int:
        raise ZeroDivisionError


# ---- what is a device ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    rows(
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (torch.device("cpu"), "cpu"),
        (torch.device("cpu", 0), "cpu"),
        (torch.device("cpu", 256), "cpu"),  # torch has made cpu:0 of it
        ("meta", "meta"),
        ("meta:0", "meta"),
        (torch.device("meta"), "meta"),
        (torch.device("meta", 0), "meta"),
        (Text("cpu"), "cpu"),
        (np.str_("cpu:0"), "cpu"),
        (Kind.CPU, "cpu"),
        ("auto", "cpu"),
        (np.str_("auto"), "cpu"),
        (Kind.AUTO, "cpu"),
    ),
)
def test_host_devices_are_canonical(spec: Any, expected: str) -> None:
    with FakeBox(built="cpu"):
        checked = devicekit.device(spec)

    assert type(checked) is torch.device
    assert str(checked) == expected
    assert checked == torch.zeros(1, device=expected).device


@pytest.mark.parametrize(
    ("spec", "expected"),
    rows(
        ("cuda", 0),
        ("cuda:0", 0),
        ("cuda:1", 1),
        (Text("cuda:1"), 1),
        (np.str_("cuda:1"), 1),
        (Kind.CUDA, 1),
        (torch.device("cuda"), 0),
        (torch.device("cuda:1"), 1),
        (torch.device("cuda:257"), 1),  # torch has made cuda:1 of it
        (0, 0),
        (1, 1),
        (Rank.ONE, 1),
        (Count.ONE, 1),
        (Index(), 1),
        (np.int64(1), 1),
        (np.uint8(1), 1),
        (np.array(1), 1),
    ),
)
@pytest.mark.parametrize("started", [False, True], ids=["cold", "started"])
def test_cuda_devices_are_canonical(spec: Any, expected: int, started: bool) -> None:
    with FakeBox(PAIR, pynvml=True):
        if started:
            torch.cuda.init()
        first, second = devicekit.device(spec), devicekit.device(spec)

    assert first == second == torch.device("cuda", expected)
    assert type(first.index) is int


@pytest.mark.parametrize(
    ("box", "spec", "expected"),
    rows(
        (FakeBox(xpu=[GPU(), GPU()]), "xpu", "xpu:0"),
        (FakeBox(xpu=[GPU(), GPU()]), 1, "xpu:1"),
        (FakeBox(mps=True), "mps", "mps:0"),
        (FakeBox(mps=True), torch.device("mps"), "mps:0"),
        (FakeBox(mps=True), 0, "mps:0"),
        (FakeBox(mtia=[GPU()]), "mtia", "mtia:0"),
        (FakeBox(hpu=[GPU()]), "hpu:0", "hpu:0"),
        (FakeBox(plugin=[GPU(), GPU()]), PLUGIN, f"{PLUGIN}:0"),
        (FakeBox(plugin=[GPU(), GPU()]), f"{PLUGIN}:1", f"{PLUGIN}:1"),
        (FakeBox(plugin=[GPU(), GPU()]), 1, f"{PLUGIN}:1"),
        (FakeBox(PAIR, built="rocm"), "cuda:1", "cuda:1"),
        (FakeBox(PAIR, plugin=[GPU()]), 0, f"{PLUGIN}:0"),
        (FakeBox(PAIR, plugin=[GPU()]), "cuda", "cuda:0"),
    ),
)
def test_devices_of_every_accelerator(box: FakeBox, spec: Any, expected: str) -> None:
    with box:
        checked = devicekit.device(spec)

    assert str(checked) == expected


def test_a_device_without_index_is_the_current_one() -> None:
    with FakeBox(PAIR):
        torch.cuda.set_device(1)
        assert devicekit.device("cuda") == torch.device("cuda:1")
        assert devicekit.device(torch.device("cuda")) == torch.device("cuda:1")
        with torch.cuda.device(0):
            assert devicekit.device("cuda") == torch.device("cuda:0")
        assert devicekit.device(0) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("box", "module", "expected"),
    [
        (FakeBox(xpu=[GPU(), GPU()]), "xpu", "xpu:1"),
        (FakeBox(plugin=[GPU(), GPU()]), PLUGIN, f"{PLUGIN}:1"),
    ],
    ids=["xpu", "plugin"],
)
def test_the_current_device_of_other_types(box: FakeBox, module: str, expected: str) -> None:
    with box:
        getattr(torch, module).set_device(1)
        checked = devicekit.device(module)

    assert str(checked) == expected


def test_a_warm_device_is_not_checked_again() -> None:
    with FakeBox(PAIR) as box:
        torch.cuda.init()
        devicekit.device("cuda:1")
        devicekit.device("cuda")
        box.calls.clear()
        found = [devicekit.device(s) for s in ("cuda:1", torch.device("cuda:1"), "cuda", "cuda:0")]

    assert [device.index for device in found] == [1, 1, 0, 0]
    assert box.calls == []


def test_a_plugin_that_breaks_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError

    with FakeBox(plugin=[GPU(), GPU()]):
        for _ in range(2):
            assert devicekit.device(f"{PLUGIN}:1") == torch.device(PLUGIN, 1)
            assert devicekit.device(PLUGIN) == torch.device(PLUGIN, 0)
        monkeypatch.setattr(getattr(torch, PLUGIN), "device_count", fail)
        for spec in (f"{PLUGIN}:1", torch.device(PLUGIN, 1), PLUGIN):
            assert refusal(spec).reason == "driver failed"


@pytest.mark.parametrize("spec", ["mps", "mps:0", torch.device("mps"), 0], ids=repr)
def test_a_device_of_a_type_that_needs_no_start(spec: Any) -> None:
    with FakeBox(mps=True):
        assert devicekit.device(spec) == devicekit.device(spec) == torch.device("mps:0")
        with fake_devices(cuda=1):
            assert refusal("mps:0").reason == "build without it"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_checks_again() -> None:
    with FakeBox(TWINS, pynvml=True):
        torch.cuda.init()
        devicekit.device("cuda:1")
        assert _found("cuda:1") is not None
        child = os.fork()
        if not child:
            # CUDA is not started there, and cannot be.
            os._exit(int(torch.cuda.is_initialized() or _found("cuda:1") is not None))
        status = os.waitpid(child, 0)[1]

    assert os.waitstatus_to_exitcode(status) == 0


def test_nothing_found_before_the_start_is_believed_afterwards() -> None:
    with FakeBox(TWINS, pynvml=True):
        assert devicekit.device("cuda:1") == torch.device("cuda:1")
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        assert refusal("cuda:1").reason == "hidden by a visibility variable"
        del os.environ["CUDA_VISIBLE_DEVICES"]
        assert devicekit.device("cuda:1") == torch.device("cuda:1")


def test_a_fake_machine_does_not_inherit_what_was_found() -> None:
    with FakeBox(PAIR):
        torch.cuda.init()
        devicekit.device("cuda:1")
        with fake_devices(cuda=1):
            assert refusal("cuda:1").reason == "index out of range"
        assert devicekit.device("cuda:1") == torch.device("cuda:1")


def test_many_threads_get_the_same_device() -> None:
    found: list[torch.device] = []
    with FakeBox(PAIR):
        torch.cuda.init()
        threads = [
            threading.Thread(target=lambda: found.append(devicekit.device("cuda:1")))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert found == [torch.device("cuda:1")] * 8


# ---- what is no device ---------------------------------------------------------------------------

KINDS = "expected the kind of GPU. Write 'cuda' for one of NVIDIA or AMD"
EXPECTED = "expected 'cpu', 'cuda', 'xpu', 'mps' or 'meta', with an index"
NEGATIVE = "indices start at 0. Write 'cpu' for the CPU, or call devicekit.auto()"
SEVERAL = "is not a device but several: expected one, such as 'cuda:0'"
UUID = "is not a device but the UUID of one: expected its number, such as in 'cuda:0'"


@pytest.mark.parametrize(
    ("spec", "message"),
    rows(
        ("cuda0", "Did you mean 'cuda:0'?"),
        ("cuda 1", "Did you mean 'cuda:1'?"),
        ("cuda_1", "Did you mean 'cuda:1'?"),
        ("cuda-1", "Did you mean 'cuda:1'?"),
        ("cuda=1", "Did you mean 'cuda:1'?"),
        ("cuda.1", "Did you mean 'cuda:1'?"),
        ("cuda/1", "Did you mean 'cuda:1'?"),
        ("cuda[1]", "Did you mean 'cuda:1'?"),
        ("cuda(1)", "Did you mean 'cuda:1'?"),
        ("cuda:", "Did you mean 'cuda'?"),
        ("cuda::1", "Did you mean 'cuda:1'?"),
        ("cuda:1:", "Did you mean 'cuda:1'?"),
        ("cuda:01", "Did you mean 'cuda:1'?"),
        ("cuda:00", "Did you mean 'cuda:0'?"),
        ("cuda:1 ", "Did you mean 'cuda:1'?"),
        ("cuda:1\n", "Did you mean 'cuda:1'?"),
        ("'cuda:1'", "Did you mean 'cuda:1'?"),
        ('"cuda"', "Did you mean 'cuda'?"),
        (" cuda", "Did you mean 'cuda'?"),
        ("CUDA", "Did you mean 'cuda'?"),
        ("Cuda:1", "Did you mean 'cuda:1'?"),
        ("cud", "Did you mean 'cuda'?"),
        ("cdua:1", "Did you mean 'cuda:1'?"),
        ("CPU", "Did you mean 'cpu'?"),
        ("cpu:00", "Did you mean 'cpu'?"),
        ("cpu1", "Did you mean 'cpu'?"),
        ("Meta", "Did you mean 'meta'?"),
        ("AUTO", "Did you mean 'auto'?"),
        ("auto:1", "Did you mean 'auto'?"),
        ("0", "Did you mean 'cuda:0'?"),
        (":1", "Did you mean 'cuda:1'?"),
        ("gpu:1", "Did you mean 'cuda:1'?"),
        ("gpu1", "Did you mean 'cuda:1'?"),
        ("device:1", "Did you mean 'cuda:1'?"),
        ("hip", "Did you mean 'cuda'?"),
        (torch.device("hip:1"), "'hip:1' is not a device. Did you mean 'cuda:1'?"),
        ("rocm:1", "Did you mean 'cuda:1'?"),
        ("nvidia", "Did you mean 'cuda'?"),
        ("metal", "Did you mean 'mps'?"),
        ("intel", "Did you mean 'xpu'?"),
        ("gaudi:2", "Did you mean 'hpu:2'?"),
        ("ascend", "Did you mean 'npu'?"),
        ("tpu", "Did you mean 'xla'?"),
        ("dml", "Did you mean 'privateuseone'?"),
        ("nvidai", "Did you mean 'cuda'?"),
        ("gpu", KINDS),
        ("GPU", KINDS),
        (" gpu ", KINDS),
        ("accelerator", KINDS),
        ("", EXPECTED),
        (" ", EXPECTED),
        (":", EXPECTED),
        ("cuda:x", EXPECTED),
        ("cuda:1.5", EXPECTED),
        ("cuda:1e3", EXPECTED),
        ("cuda:0x1", EXPECTED),
        ("cuda:\uff11", EXPECTED),
        ("cuda:²", EXPECTED),
        ("banana", EXPECTED),
        ("OpenCL", EXPECTED),  # of the types that nothing serves, none is suggested
        ("vulcan", EXPECTED),
        ("cuda\0", EXPECTED),
        ("\udc80", EXPECTED),
        ("0000:01:00.0", EXPECTED),
        ("cuda" + LONG, EXPECTED),
        ("x" * 100_000, EXPECTED),
        (" " * 5000 + "!", EXPECTED),
        ("_" * 5000 + "!", EXPECTED),
        ("0,1", SEVERAL),
        ("cuda:0,1", SEVERAL),
        ("cuda:0, cuda:1", SEVERAL),
        ("cuda:0;1", SEVERAL),
        ("cuda,cpu", SEVERAL),
        ("cuda:0-3", SEVERAL),
        ("GPU-8f3c1a2b-1111-2222-3333-444444444444", UUID),
        ("MIG-8f3c1a2b-1111-2222-3333-444444444444", UUID),
        ("-1", f"'-1' is not a device: {NEGATIVE}"),
        ("cuda:-1", NEGATIVE),
        ("cuda: -1", NEGATIVE),
        (-1, f"-1 is not a device: {NEGATIVE}"),
        (np.int64(-1), NEGATIVE),
        (-(10**5000), f"<int> is not a device: {NEGATIVE}"),
        (None, "None is not a device: expected a text such as 'cuda:0'"),
        (True, "True is not a device but of type bool"),
        (False, "False is not a device but of type bool"),
        (np.bool_(True), "is not a device but of type bool"),
        (0.0, "0.0 is not a device but of type float"),
        (1.5, "1.5 is not a device but of type float"),
        (float("nan"), "nan is not a device but of type float"),
        (np.float32(1), "is not a device but of type float32"),
        (1j, "is not a device but of type complex"),
        (b"cuda:0", "b'cuda:0' is not a device but of type bytes"),
        (b"cuda:0", "Did you mean 'cuda:0'?"),
        (b"\xff", "is not a device but of type bytes"),
        (bytearray(b"cpu"), "is not a device but of type bytearray"),
        ([], "[] is not a device but of type list"),
        (["cuda:0"], "is not a device but of type list"),
        (("cuda", 0), "('cuda', 0) is not a device but of type tuple"),
        ({"cuda"}, "is not a device but of type set"),
        ({"device": 0}, "is not a device but of type dict"),
        (torch.device, "is not a device but of type type"),
        (torch.cuda.is_available, "is not a device but of type function"),
        (torch.tensor(0), "is not a device but of type Tensor"),
        (torch.zeros(3), "is not a device but of type Tensor"),
        (np.zeros(3), "is not a device but of type ndarray"),
        (torch.nn.Linear(1, 1), "is not a device but of type Linear"),
        (torch.float32, "is not a device but of type dtype"),
        (object(), "is not a device but of type object"),
        (Broken(), "<Broken> is not a device but of type Broken"),
        (torch.device("cuda:128"), "torch keeps indices from 0 to 127"),
        (torch.device("cuda", 200), "torch keeps indices from 0 to 127"),
    ),
)
def test_what_is_no_device(spec: Any, message: str) -> None:
    with (
        FakeBox(PAIR, pynvml=True) as box,
        pytest.raises(devicekit.InvalidDeviceError, match=re.escape(message)) as caught,
    ):
        devicekit.device(spec)

    assert not isinstance(caught.value, devicekit.DeviceUnavailableError)
    assert str(caught.value)[-1] in ".?"
    assert len(str(caught.value)) < 500
    assert box.calls == []  # whatever the machine has, it is not asked


@pytest.mark.parametrize(
    ("box", "meant"),
    [
        (FakeBox(), "cuda:1"),
        (FakeBox(mps=True), "mps:1"),
        (FakeBox(xpu=[]), "xpu:1"),
    ],
    ids=["cuda", "mps", "xpu"],
)
def test_a_bare_number_means_the_accelerator_of_this_build(box: FakeBox, meant: str) -> None:
    with box, pytest.raises(devicekit.InvalidDeviceError, match=f"Did you mean '{meant}'"):
        devicekit.device("gpu1")


@pytest.mark.parametrize("spec", ["0", ":1", "gpu1", "device:1"])
def test_a_bare_number_means_nothing_to_a_build_without_accelerators(spec: str) -> None:
    with (
        FakeBox(built="cpu"),
        pytest.raises(devicekit.InvalidDeviceError, match="has no accelerator") as caught,
    ):
        devicekit.device(spec)

    assert "cuda" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:'mkldnn' is no longer used")
def test_every_type_that_torch_can_spell_is_known() -> None:
    with pytest.raises(RuntimeError, match="Expected one of") as caught:
        torch.device("banana")
    spelled = str(caught.value).split("Expected one of ")[1].split(" device type")[0].split(", ")

    for name in spelled:
        if name == "hip":
            continue
        assert parse(name) == (name, None)
        assert parse(torch.device(name)) == (name, None)
        assert parse(f"{name}:7") == (name, 7)


# ---- a device, but not here ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "spec", "reason", "cause"),
    [
        pytest.param(
            FakeBox(built="cpu"), "cuda:10", "build without it", "has no CUDA.", id="cpu-build"
        ),
        pytest.param(
            FakeBox(built="cpu"), "mps", "build without it", "has no MPS, which is for", id="no-mps"
        ),
        pytest.param(
            FakeBox(PAIR), "xpu:1", "build without it", "has no XPU. Here: cuda:0", id="no-xpu"
        ),
        pytest.param(FakeBox(PAIR), "mtia", "build without it", "has no MTIA.", id="no-mtia"),
        pytest.param(
            FakeBox(PAIR), "vulkan", "build without it", "no more than the name", id="unused"
        ),
        pytest.param(
            FakeBox(built="cpu"),
            "npu:0",
            "plugin not installed",
            "the plugin torch_npu is not imported",
            id="npu",
        ),
        pytest.param(
            FakeBox(PAIR),
            PLUGIN,
            "plugin not installed",
            f"the plugin for {PLUGIN} is not imported",
            id="privateuse1",
        ),
        pytest.param(
            FakeBox(plugin=[GPU()], plugin_module=False),
            PLUGIN,
            "driver failed",
            "the plugin registered no device module",
            id="plugin-without-module",
        ),
        pytest.param(
            FakeBox(plugin=[]), PLUGIN, "none visible", "the driver sees no", id="plugin-empty"
        ),
        pytest.param(
            FakeBox(), "cuda", "no driver", "this machine has no NVIDIA driver", id="no-driver"
        ),
        pytest.param(
            FakeBox(PAIR, driver_installed=False, pynvml=True, smi=True),
            "cuda:1",
            "no driver",
            "this machine has no NVIDIA driver",
            id="gpus-without-driver",
        ),
        pytest.param(
            FakeBox(driver_installed=True), "cuda", "none visible", "sees no CUDA", id="no-gpu"
        ),
        pytest.param(
            FakeBox(driver_installed=True, pynvml=True),
            "cuda",
            "none visible",
            "the driver sees no CUDA device",
            id="no-gpu-nvml",
        ),
        pytest.param(
            FakeBox(PAIR, driver_cuda="11.4"),
            "cuda",
            "driver too old",
            "too old for this build of torch (CUDA 12.8) (CUDA initialization: The NVIDIA driver",
            id="old-driver",
        ),
        pytest.param(
            FakeBox(PAIR, driver_cuda="11.4", pynvml=True),
            "cuda:1",
            "driver too old",
            "found version 11040",
            id="old-driver-nvml",
        ),
        pytest.param(
            FakeBox(PAIR, driver_cuda="11.4", env={"CUDA_VISIBLE_DEVICES": "GPU-00000001-aaaa"}),
            "cuda",
            "driver too old",
            "the driver is too old",
            id="old-driver-and-uuid",
        ),
        pytest.param(
            FakeBox(PAIR, init_error=CUDA_UNKNOWN_ERROR),
            "cuda",
            "driver failed",
            "CUDA did not start (CUDA initialization: CUDA unknown error",
            id="unknown-error",
        ),
        pytest.param(
            FakeBox(PAIR, init_error=DRIVER_MISMATCH, nvml_error=18, pynvml=True),
            "cuda",
            "driver failed",
            "Error 803",
            id="mismatch",
        ),
        pytest.param(
            FakeBox(env={"CUDA_VISIBLE_DEVICES": "GPU-00000001"}),
            "cuda",
            "no driver",
            "this machine has no NVIDIA driver",
            id="no-driver-and-uuid",
        ),
        pytest.param(
            FakeBox(PAIR, pynvml=True),
            "cuda:2",
            "index out of range",
            "this process sees 2 CUDA devices, numbered from 0. Here: cuda:0 (A), cuda:1 (B)",
            id="out-of-range",
        ),
        pytest.param(
            FakeBox([GPU()], pynvml=True),
            "cuda:1",
            "index out of range",
            "this process sees 1 CUDA device, numbered from 0",
            id="only-one",
        ),
        pytest.param(FakeBox(PAIR), 2, "index out of range", "'cuda:2' is not available", id="int"),
        pytest.param(
            FakeBox(PAIR),
            np.int64(2),
            "index out of range",
            "'cuda:2' is not available",
            id="numpy",
        ),
        pytest.param(FakeBox(PAIR), Rank.ONE + 1, "index out of range", "'cuda:2'", id="enum"),
        pytest.param(FakeBox(PAIR), "cuda:256", "index out of range", "'cuda:256'", id="256"),
        pytest.param(FakeBox(PAIR), 257, "index out of range", "'cuda:257'", id="257"),
        pytest.param(FakeBox(PAIR), f"cuda:{LONG}", "index out of range", "'cuda:999", id="long"),
        pytest.param(FakeBox(PAIR), 10**5000, "index out of range", "'cuda:<int>'", id="huge"),
        pytest.param(
            FakeBox(PAIR, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "1"}),
            "cuda:1",
            "hidden by a visibility variable",
            "sees 1 CUDA device, numbered from 0, because of CUDA_VISIBLE_DEVICES='1'",
            id="hidden",
        ),
        pytest.param(
            FakeBox(PAIR, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "1"}),
            "cuda:2",
            "index out of range",
            "numbered from 0 (CUDA_VISIBLE_DEVICES='1')",
            id="more-than-there-are",
        ),
        pytest.param(
            FakeBox(PAIR, env={"CUDA_VISIBLE_DEVICES": "0,1"}),
            "cuda:2",
            "index out of range",
            "Use an index below 2, or change CUDA_VISIBLE_DEVICES before the program starts.",
            id="nobody-knows-how-many",
        ),
        pytest.param(
            FakeBox(PAIR, pynvml=True, env={"CUDA_VISIBLE_DEVICES": ""}),
            "cuda",
            "hidden by a visibility variable",
            "CUDA_VISIBLE_DEVICES='' leaves no CUDA device visible",
            id="all-hidden",
        ),
        pytest.param(
            FakeBox(PAIR, env={"CUDA_VISIBLE_DEVICES": "-1"}),
            "cuda",
            "hidden by a visibility variable",
            "CUDA_VISIBLE_DEVICES='-1' leaves no CUDA device visible",
            id="all-hidden-without-nvml",
        ),
        pytest.param(
            FakeBox(PAIR, env={"CUDA_VISIBLE_DEVICES": "7"}),
            "cuda",
            "hidden by a visibility variable",
            "CUDA_VISIBLE_DEVICES='7' leaves no CUDA device visible",
            id="number-of-no-gpu",
        ),
        pytest.param(
            FakeBox(PAIR, env={"CUDA_VISIBLE_DEVICES": "GPU-ffffffff"}),
            "cuda",
            "hidden by a visibility variable",
            "CUDA_VISIBLE_DEVICES='GPU-ffffffff' leaves no CUDA device visible",
            id="uuid-of-no-gpu",
        ),
        pytest.param(
            FakeBox(PAIR, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "0,0"}),
            "cuda",
            "hidden by a visibility variable",
            "CUDA_VISIBLE_DEVICES='0,0' leaves no",
            id="twice",
        ),
        pytest.param(
            FakeBox(PAIR, pynvml=True, env={"CUDA_VISIBLE_DEVICES": "all"}),
            "cuda",
            "hidden by a visibility variable",
            "CUDA_VISIBLE_DEVICES='all' leaves no",
            id="all",
        ),
        pytest.param(
            FakeBox(PAIR, pynvml=True, env={"CUDA_VISIBLE_DEVICES": LONG}),
            "cuda",
            "hidden by a visibility variable",
            "leaves no CUDA device visible",
            id="variable-of-5000-digits",
        ),
        pytest.param(
            FakeBox(PAIR, env={"CUDA_VISIBLE_DEVICES": "-"}),
            "cuda",
            "hidden by a visibility variable",
            "CUDA_VISIBLE_DEVICES='-' leaves no CUDA device visible",
            id="variable-that-torch-cannot-read",
        ),
        pytest.param(
            FakeBox(
                PAIR, built="rocm", env={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}
            ),
            "cuda",
            "hidden by a visibility variable",
            "ROCR_VISIBLE_DEVICES='1' and HIP_VISIBLE_DEVICES='1' leave no ROCm",
            id="hidden-twice-over",
        ),
        pytest.param(
            FakeBox(
                PAIR, built="rocm", env={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0,1"}
            ),
            "cuda",
            "driver failed",
            "HIP_VISIBLE_DEVICES contains more devices than ROCR_VISIBLE_DEVICES",
            id="torch-cannot-read-it",
        ),
        pytest.param(
            FakeBox(PAIR, built="rocm", init_error="No HIP GPUs are available"),
            "cuda",
            "none visible",
            "the driver sees no ROCm device",
            id="rocm-none",
        ),
        pytest.param(
            FakeBox(built="rocm", init_error="Found no NVIDIA driver on your system."),
            "cuda",
            "no driver",
            "this machine has no AMD driver",
            id="rocm-no-driver",
        ),
        pytest.param(
            FakeBox(
                [GPU(capability=(6, 1), name="GTX 1080")], pynvml=True, arch_list="sm_75 sm_80"
            ),
            "cuda",
            "architecture not in this build",
            "GTX 1080 has compute capability 6.1, and this build of torch has kernels for sm_75",
            id="architecture",
        ),
        pytest.param(
            FakeBox([GPU(arch="gfx803")], built="rocm", arch_list="gfx90a gfx942"),
            "cuda",
            "architecture not in this build",
            "has kernels for gfx90a gfx942 only",
            id="rocm-architecture",
        ),
        pytest.param(
            FakeBox(
                PAIR, init_error=CUDA_UNKNOWN_ERROR, env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            ),
            "cuda",
            "driver failed",
            "CUDA counts this device and does not start",
            id="nvml-based-check",
        ),
        pytest.param(
            FakeBox(xpu=[]), "xpu", "none visible", "the driver sees no XPU device", id="xpu-none"
        ),
        pytest.param(
            FakeBox(xpu=[GPU()], env={"ZE_AFFINITY_MASK": "5"}),
            "xpu",
            "hidden by a visibility variable",
            "ZE_AFFINITY_MASK='5' leaves no XPU device visible",
            id="xpu-hidden",
        ),
        pytest.param(FakeBox(mps=False), "mps", "none visible", "sees no MPS device", id="no-mac"),
        pytest.param(FakeBox(mps=True), "mps:1", "index out of range", "sees 1 MPS", id="mps-1"),
        pytest.param(FakeBox(built="cpu"), 0, "build without it", "0 is not available", id="none"),
        pytest.param(
            FakeBox(built="cpu"), 10**5000, "build without it", "<int> is not", id="none-huge"
        ),
        pytest.param(FakeBox(), 0, "no driver", "'cuda:0' is not available", id="int-no-driver"),
        pytest.param(
            FakeBox(PAIR), "cpu:1", "index out of range", "there is one cpu device", id="cpu"
        ),
        pytest.param(
            FakeBox(PAIR),
            torch.device("meta:3"),
            "index out of range",
            "'meta:3' is not available: there is one meta device",
            id="meta",
        ),
        pytest.param(FakeBox(PAIR), f"cpu:{LONG}", "index out of range", "'cpu:999", id="cpu-long"),
    ],
)
def test_a_device_that_is_not_here(box: FakeBox, spec: Any, reason: str, cause: str) -> None:
    with box:
        error, again = refusal(spec), refusal(spec)

    assert error.reason == again.reason == reason
    assert cause in str(error)
    assert str(error).endswith(".")
    assert ".." not in str(error).replace("...", "")
    assert len(error.available) >= 1
    assert error.available[-1].type in ("cpu", "meta")
    assert error.requested
    if isinstance(spec, (str, torch.device)):
        assert error.requested == str(spec)
    elif spec == 0:
        assert error.requested in ("0", "cuda:0")
    assert box.contexts == set()


@pytest.mark.parametrize("name", UNUSED_TYPES)
def test_types_that_nothing_serves_are_refused(name: str) -> None:
    error = refusal(name)

    assert error.reason == "build without it"
    assert "Install" not in str(error)


def test_an_error_names_what_there_is() -> None:
    with FakeBox([GPU(name="A"), GPU(name="old", capability=(5, 0))], pynvml=True):
        error = refusal("cuda:1")

    assert names(error) == ["cuda:0", "cpu"]
    assert "Here: cuda:0 (A), cpu (" in str(error)


def test_a_busy_device_is_one() -> None:
    with FakeBox([GPU(mode="exclusive_process", pids=(1,))], pynvml=True):
        assert devicekit.device("cuda") == torch.device("cuda:0")


def test_checking_starts_nothing_where_the_management_library_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeBox(TWINS, pynvml=True) as box:
        official(monkeypatch)
        assert devicekit.device("cuda:1") == torch.device("cuda:1")
        assert devicekit.device("cuda") == torch.device("cuda:0")
        refusal("cuda:2")

        assert not box.fork_poisoned
        assert not torch.cuda.is_initialized()


def official(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the build one of torch's releases, whose architectures torch itself lists."""
    table = {"12.8": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 120}}}
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu128")
    monkeypatch.setattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", table, raising=False)


# ---- properties ----------------------------------------------------------------------------------

NAMES = ["cpu", "cuda", "meta", "mps", "xpu", "gpu", "auto", "npu", PLUGIN, "hip", "CUDA", "cda"]
spellings = st.one_of(
    st.text(max_size=60),
    st.text("cudamepsxgn:_-,.;01 29'[]\n", max_size=20),
    st.builds("{}{}{}".format, st.sampled_from(NAMES), st.text(": _-0", max_size=3), st.integers()),
    st.builds("{}:{}".format, st.sampled_from(NAMES), st.integers(0, 300)),
    st.sampled_from(NAMES),
)
anything: st.SearchStrategy[Any] = st.one_of(
    spellings,
    st.integers(),
    st.integers(0, 300),
    st.floats(),
    st.booleans(),
    st.binary(max_size=20),
    st.none(),
    st.complex_numbers(),
    st.decimals(),
    st.dates(),
    st.lists(spellings, max_size=2),
    st.tuples(spellings, st.integers()),
    st.dictionaries(spellings, st.integers(), max_size=2),
    st.builds(
        torch.device, st.sampled_from(["cpu", "cuda", "meta", "hip", "xpu"]), st.integers(0, 300)
    ),
    st.builds(object),
    st.builds(Broken),
    st.builds(np.int64, st.integers(-5, 5)),
)


@pytest.mark.parametrize(
    "options",
    [{"cuda": 2}, {}, {"mps": 1}, {"xpu": 3}, {"cuda": 1, "driver": None}, {"rocm": 128}],
    ids=str,
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=anything)
def test_anything_is_a_device_or_refused(options: dict[str, Any], spec: Any) -> None:
    with fake_devices(**options):
        outcome: Any
        try:
            outcome = devicekit.device(spec)
        except devicekit.DeviceError as error:
            outcome = error

        if type(outcome) is torch.device:
            assert (outcome.index is None) == (outcome.type in ("cpu", "meta"))
            assert devicekit.device(outcome) == outcome
            assert devicekit.device(str(outcome)) == outcome
        elif type(outcome) is devicekit.InvalidDeviceError:
            assert_possible(suggestion=str(outcome))
        else:
            assert type(outcome) is devicekit.DeviceUnavailableError
            assert outcome.reason is not None
            assert outcome.requested is not None
            assert outcome.available[-1].type in ("cpu", "meta")
            assert str(pickle.loads(pickle.dumps(outcome))) == str(outcome)


def assert_possible(*, suggestion: str) -> None:
    """Check that what an error suggests is a device at least."""
    meant = re.search(r"Did you mean '([^']*)'\?$", suggestion)
    if meant and "of type bytes" not in suggestion and meant.group(1) != "auto":
        parse(meant.group(1))


@settings(max_examples=300, deadline=None)
@given(index=st.integers(0, 10**6))
def test_an_index_is_never_another_one(index: int) -> None:
    with fake_devices(cuda=4):
        for spec in (index, f"cuda:{index}"):
            if index < 4:
                assert devicekit.device(spec).index == index
            else:
                assert refusal(spec).requested == f"cuda:{index}"


@settings(max_examples=200, deadline=None)
@given(value=anything)
def test_showing_a_value_never_fails(value: Any) -> None:
    assert 0 < len(shown(value)) <= 120


def test_no_other_index_is_advised_where_none_is_usable() -> None:
    with (
        fake_devices(cuda=1, capability=(3, 5)),
        pytest.raises(devicekit.DeviceUnavailableError, match="numbered from 0") as caught,
    ):
        devicekit.device("cuda:1")

    assert "Use an index below" not in str(caught.value)
    assert "devicekit.auto()" in str(caught.value)
