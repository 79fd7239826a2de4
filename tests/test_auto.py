"""auto(): the rules in their order, on machines that are made up below torch and on fake ones."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakebox import CUDA_UNKNOWN_ERROR, GIB, GPU, FakeBox

import devicekit
from devicekit._backends import current_machine, this_machine
from devicekit._device.checking import _FOUND
from devicekit._device.choice import decide
from devicekit.testing import fake_devices

PLUGIN = torch._C._get_privateuse1_backend_name()
FIRST = "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd"
SECOND = "GPU-00000001-aaaa-bbbb-cccc-dddddddddddd"
TWINS = [GPU(free=10), GPU(free=70)]
# CUDA numbers the fastest first, management goes by the bus: 0 is the last of these to CUDA.
UNEQUAL = [GPU(name="slow", speed=1, free=70), GPU(name="fast", speed=9, free=10)]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test meets another machine in this process: nothing found or decided is kept."""
    forget()
    yield
    forget()


def forget() -> None:
    this_machine().decisions.clear()
    _FOUND.clear()


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the build one of torch's releases, whose architectures torch lists without asking."""
    numbers = {75, 80, 86, 90, 100, 120}
    table = {"12.8": {"x86_64": numbers, "amd64": numbers, "aarch64": numbers, "arm64": numbers}}
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu128")
    monkeypatch.setattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", table, raising=False)


def chosen(**options: Any) -> str:
    return str(devicekit.auto(**options))


# ---- 1: DEVICEKIT_DEVICE -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        ("cuda", "cuda:0"),
        ("cuda:0", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("meta", "meta"),
        ("auto", "cuda:1"),
        ("", "cuda:1"),  # what `DEVICEKIT_DEVICE= python ...` means to those who write it
    ],
)
def test_the_variable_decides(value: str, expected: str) -> None:
    with FakeBox(TWINS, pynvml=True, env={"DEVICEKIT_DEVICE": value}):
        assert chosen() == expected
        assert str(devicekit.device("auto")) == expected


def test_the_variable_stands_before_everything_else() -> None:
    env = {"DEVICEKIT_DEVICE": "cuda:0", "LOCAL_RANK": "1"}

    with FakeBox(TWINS, pynvml=True, env=env):
        torch.cuda.set_device(1)
        assert chosen(prefer="cpu", min_free="60GiB") == "cuda:0"


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (" ", devicekit.InvalidDeviceError, "' ' is not a device"),
        ("gpu", devicekit.InvalidDeviceError, "expected the kind of GPU"),
        ("CUDA", devicekit.InvalidDeviceError, "Did you mean 'cuda'"),
        ("0", devicekit.InvalidDeviceError, "Did you mean 'cuda:0'"),
        ("-1", devicekit.InvalidDeviceError, "indices start at 0"),
        ("cuda:7", devicekit.DeviceUnavailableError, "sees 2 CUDA devices"),
        ("xpu", devicekit.DeviceUnavailableError, "has no XPU"),
        ("npu", devicekit.DeviceUnavailableError, "torch_npu is not imported"),
        ("x" * 9000, devicekit.InvalidDeviceError, "is not a device"),
    ],
)
def test_a_bad_variable_is_named(value: str, error: type[Exception], message: str) -> None:
    whole = rf"^The environment variable DEVICEKIT_DEVICE is set to '{value[:50]}.*{message}"

    with FakeBox(TWINS, pynvml=True, env={"DEVICEKIT_DEVICE": value}):
        for _ in range(2):
            with pytest.raises(error, match=whole) as caught:
                devicekit.auto()
            assert str(caught.value).count("DEVICEKIT_DEVICE") == 1
        os.environ["DEVICEKIT_DEVICE"] = "cuda:0"
        assert chosen() == "cuda:0"


# ---- 2: the types --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        pytest.param(FakeBox(built="cpu"), "cpu", id="cpu-build"),
        pytest.param(FakeBox(TWINS, built="cpu"), "cpu", id="cpu-build-with-gpus"),
        pytest.param(FakeBox(), "cpu", id="no-driver"),
        pytest.param(FakeBox(driver_installed=True), "cpu", id="no-gpu"),
        pytest.param(FakeBox([GPU()]), "cuda:0", id="one"),
        pytest.param(FakeBox(TWINS, driver_cuda="11.4"), "cpu", id="old-driver"),
        pytest.param(FakeBox(TWINS, driver_cuda="11.4", pynvml=True), "cpu", id="old-driver-nvml"),
        pytest.param(FakeBox(TWINS, init_error=CUDA_UNKNOWN_ERROR), "cpu", id="unknown-error"),
        pytest.param(FakeBox(TWINS, env={"CUDA_VISIBLE_DEVICES": ""}), "cpu", id="hidden"),
        pytest.param(FakeBox([GPU(capability=(5, 0))], pynvml=True), "cpu", id="architecture"),
        pytest.param(
            FakeBox([GPU(capability=(5, 0))], pynvml=True, arch_list="sm_90 compute_50"),
            "cuda:0",
            id="ptx",
        ),
        pytest.param(
            FakeBox([GPU(capability=(5, 0)), GPU(free=1)], pynvml=True), "cuda:1", id="one-too-old"
        ),
        pytest.param(FakeBox([GPU(mode="prohibited")], pynvml=True), "cpu", id="prohibited"),
        pytest.param(
            FakeBox([GPU(mode="exclusive_process", pids=(1,)), GPU(free=1)], pynvml=True),
            "cuda:1",
            id="busy",
        ),
        pytest.param(
            FakeBox([GPU(mode="exclusive_process", pids=(1,)), GPU(free=1)], smi=True),
            "cuda:1",
            id="busy-smi",
        ),
        pytest.param(
            FakeBox([GPU(mode="exclusive_process", pids=(os.getpid(),))], pynvml=True),
            "cuda:0",
            id="busy-with-this-process",
        ),
        pytest.param(FakeBox(TWINS, built="rocm"), "cuda:0", id="rocm"),
        pytest.param(
            FakeBox([GPU(arch="gfx803"), GPU(arch="gfx942:sramecc+")], built="rocm"),
            "cuda:1",
            id="rocm-architecture",
        ),
        pytest.param(FakeBox(xpu=[GPU(), GPU()]), "xpu:0", id="xpu"),
        pytest.param(FakeBox(xpu=[]), "cpu", id="no-xpu"),
        pytest.param(FakeBox(mps=True), "mps:0", id="mps"),
        pytest.param(FakeBox(mps=False), "cpu", id="no-mps"),
        pytest.param(FakeBox(mtia=[GPU()]), "mtia:0", id="mtia"),
        pytest.param(FakeBox(hpu=[GPU()]), "hpu:0", id="hpu"),
        pytest.param(FakeBox(plugin=[GPU()]), f"{PLUGIN}:0", id="plugin"),
        pytest.param(FakeBox(plugin=[]), "cpu", id="plugin-empty"),
        pytest.param(FakeBox(plugin=[GPU()], plugin_module=False), "cpu", id="plugin-half"),
        pytest.param(FakeBox([GPU()], plugin=[GPU()]), f"{PLUGIN}:0", id="plugin-before-cuda"),
        pytest.param(FakeBox([GPU()], plugin=[]), "cuda:0", id="cuda-after-empty-plugin"),
        pytest.param(FakeBox([GPU()], hpu=[GPU()]), "cuda:0", id="cuda-before-hpu"),
        pytest.param(FakeBox(hpu=[GPU()], built="cuda"), "hpu:0", id="hpu-after-no-cuda"),
    ],
)
def test_the_first_type_with_a_usable_device(box: FakeBox, expected: str) -> None:
    with box:
        assert chosen() == expected
        assert box.contexts == set()


@pytest.mark.parametrize(
    ("prefer", "expected"),
    [
        (None, f"{PLUGIN}:0"),
        ("cuda", "cuda:1"),
        (("cuda",), "cuda:1"),
        (["xpu", "cuda"], "cuda:1"),
        (("hpu", "cuda"), "hpu:0"),
        (("mps", "npu", "xla", "fpga"), "cpu"),
        ("cpu", "cpu"),
        (("cpu", "cuda"), "cpu"),
        (("cuda", "cpu"), "cuda:1"),
        (("mps", "cpu", "cuda"), "cpu"),
        ((), "cpu"),
        (iter(["cuda"]), "cuda:1"),
    ],
    ids=str,
)
def test_prefer(prefer: Any, expected: str) -> None:
    with FakeBox(TWINS, pynvml=True, plugin=[GPU()], hpu=[GPU()]):
        assert chosen(prefer=prefer) == expected


@pytest.mark.parametrize(
    "prefer",
    ["gpu", "cuda:0", "CUDA", "", "auto", "meta", ("cuda", "gpu"), (0,), [None], b"cuda", (["a"],)],
    ids=ascii,
)
def test_a_bad_preference(prefer: Any) -> None:
    with (
        FakeBox(TWINS, pynvml=True),
        pytest.raises(devicekit.InvalidDeviceError, match="is not a device type: expected a name"),
    ):
        devicekit.auto(prefer=prefer)


@pytest.mark.parametrize("prefer", [0, 1.5, True, torch.device("cuda")], ids=ascii)
def test_a_preference_that_is_no_sequence(prefer: Any) -> None:
    with pytest.raises(devicekit.InvalidDeviceError, match="is not a device type: expected a name"):
        devicekit.auto(prefer=prefer)


# ---- min_free ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("min_free", "expected"),
    [
        (None, "cuda:2"),
        (0, "cuda:2"),
        (20 * GIB, "cuda:2"),
        ("20GiB", "cuda:2"),
        ("20 gb", "cuda:2"),
        ("70GiB", "cuda:2"),
        (70 * GIB + 1, "cpu"),
        ("1TiB", "cpu"),
        ("1000000000000000000000 B", None),
        (10**400, "cpu"),
        (-1, None),
        (1.5, None),
        (True, None),
        ("", None),
        ("much", None),
        ("-1GiB", None),
        ("8 GiBs", None),
        ("1e9", None),
        (b"8GiB", None),
        ([8], None),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_min_free(min_free: Any, expected: str | None) -> None:
    with FakeBox([GPU(free=10), GPU(free=30), GPU(free=70)], pynvml=True):
        if expected is None:
            with pytest.raises(ValueError, match="is not an amount of memory: expected a number"):
                devicekit.auto(min_free=min_free)
        else:
            assert chosen(min_free=min_free) == expected


def test_min_free_may_have_more_digits_than_python_prints() -> None:
    with FakeBox(TWINS, pynvml=True):
        assert chosen(min_free=10**5000) == "cpu"


def test_a_device_in_use_with_too_little_memory_is_passed_over() -> None:
    with FakeBox([GPU(free=10, reserved=1), GPU(free=70)], pynvml=True):
        torch.cuda.init()
        assert chosen() == "cuda:0"
        assert chosen(min_free="20GiB") == "cuda:1"


def test_a_type_with_too_little_memory_is_passed_over() -> None:
    with FakeBox(TWINS, pynvml=True, hpu=[GPU()]):
        assert chosen(min_free="100GiB") == "hpu:0"  # whose free memory nobody knows


def test_unknown_free_memory_is_enough() -> None:
    with FakeBox([GPU(free=1)]):
        assert chosen(min_free="60GiB") == "cuda:0"


# ---- 3: the launcher's rank ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"LOCAL_RANK": "0"}, "cuda:0"),
        ({"LOCAL_RANK": "1"}, "cuda:1"),
        ({"SLURM_LOCALID": "1"}, "cuda:1"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "cuda:1"),
        ({"LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, "cuda:2"),
        ({"SLURM_LOCALID": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "cuda:2"),
        ({"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "2"}, "cuda:0"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,0"}, "cuda:1"),
        ({"RANK": "2"}, "cuda:1"),
        ({"LOCAL_WORLD_SIZE": "2"}, "cuda:1"),
    ],
    ids=str,
)
def test_the_rank_decides(env: dict[str, str], expected: str) -> None:
    with FakeBox([GPU(free=1), GPU(free=70), GPU(free=2)], pynvml=True, env=env):
        assert chosen() == expected


@pytest.mark.parametrize(
    "value", ["", " ", "-1", "+1", "1.0", "one", "0x1", "1,2", " 1", "1\n", "\u0661", "9" * 5000]
)
@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_a_malformed_rank(variable: str, value: str) -> None:
    message = rf"^The environment variable {variable} is '.*': expected the rank of this process"

    with (
        fake_devices(cuda=2, environ={variable: value}),
        pytest.raises(devicekit.InvalidDeviceError, match=message) as caught,
    ):
        devicekit.auto()

    assert len(str(caught.value)) < 400


def test_a_malformed_rank_does_not_matter_where_there_is_nothing_to_share() -> None:
    with fake_devices(environ={"LOCAL_RANK": "one"}):
        assert chosen() == "cpu"
    with fake_devices(cuda=2, environ={"LOCAL_RANK": "one", "DEVICEKIT_DEVICE": "cuda:1"}):
        assert chosen() == "cuda:1"
    with fake_devices(cuda=2, environ={"LOCAL_RANK": "one"}):
        assert chosen(prefer="cpu") == "cpu"


def test_a_rank_without_a_device_prints_both_numbers() -> None:
    env = {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1"}

    with (
        FakeBox([GPU()] * 4, pynvml=True, env=env),
        pytest.raises(devicekit.DeviceUnavailableError, match="LOCAL_RANK is 3") as caught,
    ):
        devicekit.auto()

    assert str(caught.value) == (
        "LOCAL_RANK is 3, but this process sees 2 cuda devices, numbered from 0 "
        "(CUDA_VISIBLE_DEVICES='0,1'). Start at most 2 processes on this machine."
    )
    assert caught.value.requested == "cuda:3"
    assert caught.value.reason == "index out of range"
    assert caught.value.available == (torch.device("cuda:0"), torch.device("cuda:1"))


def test_a_rank_whose_device_cannot_be_used() -> None:
    with (
        FakeBox([GPU(), GPU(capability=(5, 0))], pynvml=True, env={"LOCAL_RANK": "1"}),
        pytest.raises(devicekit.DeviceUnavailableError, match="cuda:1 cannot be used") as caught,
    ):
        devicekit.auto()

    assert caught.value.reason == "architecture not in this build"
    assert caught.value.available == (torch.device("cuda:0"),)


def test_a_rank_whose_device_has_too_little_memory() -> None:
    with (
        FakeBox(TWINS, pynvml=True, env={"LOCAL_RANK": "0"}),
        pytest.raises(devicekit.DeviceUnavailableError, match=r"10.0 GiB free of the 20.0 GiB wan"),
    ):
        devicekit.auto(min_free="20GiB")


def test_a_rank_beats_the_device_in_use() -> None:
    with FakeBox([GPU(reserved=1), GPU()], env={"LOCAL_RANK": "1"}):
        torch.cuda.init()
        assert chosen() == "cuda:1"


def test_ranks_of_other_types() -> None:
    with FakeBox(xpu=[GPU(), GPU()], env={"LOCAL_RANK": "1"}):
        assert chosen() == "xpu:1"
    forget()
    with FakeBox(mps=True, env={"LOCAL_RANK": "1"}):
        assert chosen() == "mps:0"


# ---- 3: the device in use, free memory -----------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "current", "expected"),
    [
        ([GPU(free=70), GPU(free=10, reserved=2)], None, "cuda:1"),
        ([GPU(free=70, reserved=1), GPU(free=10, reserved=2)], None, "cuda:0"),
        ([GPU(free=70), GPU(free=10, reserved=1), GPU(free=5, reserved=2)], None, "cuda:2"),
        ([GPU(free=70), GPU(free=10)], 1, "cuda:1"),
        ([GPU(free=70, reserved=1), GPU(free=10)], 1, "cuda:0"),
        ([GPU(free=10), GPU(free=70)], None, "cuda:1"),
    ],
    ids=["memory", "current-with-memory", "most-memory", "current", "memory-elsewhere", "none"],
)
def test_the_device_in_use(gpus: list[GPU], current: int | None, expected: str) -> None:
    with FakeBox(gpus, pynvml=True):
        torch.cuda.init()
        if current is not None:
            torch.cuda.set_device(current)
        assert chosen() == expected


def test_the_device_in_use_of_other_types() -> None:
    with FakeBox(xpu=[GPU(), GPU(reserved=1)]):
        torch.xpu.init()
        assert chosen() == "xpu:1"
    forget()
    with FakeBox(xpu=[GPU(), GPU()]):
        torch.xpu.set_device(1)
        assert chosen() == "xpu:1"
    forget()
    with FakeBox(plugin=[GPU(), GPU()]):
        getattr(torch, PLUGIN).set_device(1)
        assert chosen() == f"{PLUGIN}:1"


@pytest.mark.parametrize("tool", ["pynvml", "smi"])
@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ((1, 5, 70, 3, 71, 0.1, 9, 9), "cuda:4"),
        ((9, 9, 9), "cuda:0"),
        ((1, 9, 9), "cuda:1"),
        ((0, 0), "cuda:0"),
    ],
    ids=["most", "all-equal", "two-equal", "full"],
)
def test_the_most_free_memory(free: tuple[float, ...], expected: str, tool: str) -> None:
    with FakeBox([GPU(free=f) for f in free], **{tool: True}) as box:
        assert chosen() == expected

        assert box.contexts == set()
        assert not box.fork_poisoned
        assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("tool", ["pynvml", "smi"])
@pytest.mark.parametrize(
    ("gpus", "env", "expected"),
    [
        # torch's cuda:0 is "fast", the last on the bus; the freest is "slow".
        (UNEQUAL, {}, "cuda:1"),
        (UNEQUAL, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "cuda:0"),
        (UNEQUAL, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "cuda:1"),
        (UNEQUAL, {"CUDA_VISIBLE_DEVICES": "1,0"}, "cuda:0"),
        (UNEQUAL, {"CUDA_VISIBLE_DEVICES": "0"}, "cuda:0"),
        (
            UNEQUAL,
            {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            "cuda:1",
        ),
        (UNEQUAL, {"CUDA_VISIBLE_DEVICES": f"{SECOND},{FIRST}"}, "cuda:1"),
        (UNEQUAL, {"CUDA_VISIBLE_DEVICES": f"{FIRST},{SECOND}"}, "cuda:0"),
        (UNEQUAL, {"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, "cuda:0"),
        ([GPU(free=f) for f in (1, 70, 30)], {"CUDA_VISIBLE_DEVICES": "2,0"}, "cuda:0"),
        ([GPU(free=f) for f in (1, 70, 30)], {"CUDA_VISIBLE_DEVICES": "2,1"}, "cuda:1"),
        ([GPU(free=f) for f in (1, 70, 30)], {"CUDA_VISIBLE_DEVICES": "2,9,1"}, "cuda:0"),
    ],
    ids=str,
)
def test_free_memory_goes_by_uuid(
    gpus: list[GPU], env: dict[str, str], expected: str, tool: str
) -> None:
    with FakeBox(gpus, env=env, **{tool: True}) as box:
        device = devicekit.auto()
        infos = devicekit.devices()[:-1]
        assert box.contexts == set()
        free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]

    assert str(device) == expected
    assert free.index(max(free)) == device.index
    assert [info.free_memory for info in infos] == free


def test_gpus_whose_order_is_known_are_not_started() -> None:
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    with FakeBox(UNEQUAL, env=env, pynvml=True) as box:
        assert chosen() == "cuda:0"
        assert not box.fork_poisoned


def test_a_slice_is_not_taken_for_the_whole_gpu() -> None:
    migs = ("MIG-11111111-aaaa", "MIG-22222222-aaaa")
    for tool in ("pynvml", "smi"):
        forget()
        with FakeBox([GPU(free=60, migs=migs)], **{tool: True}):
            info = devicekit.devices()[0]
            assert info.total_memory == 40 * GIB
            assert info.free_memory is None
            assert chosen(min_free="50GiB") == "cuda:0"


@pytest.mark.parametrize(
    "box",
    [
        FakeBox([GPU(free=1), GPU(free=70)]),
        FakeBox([GPU(free=1), GPU(free=70)], pynvml=True, nvml_rejects={"nvmlDeviceGetUUID"}),
        FakeBox([GPU(free=1, unified=True), GPU(free=70, unified=True)], pynvml=True),
        FakeBox([GPU(free=1, unified=True), GPU(free=70, unified=True)], smi=True),
        FakeBox([GPU(free=1), GPU(free=70)], built="rocm"),
    ],
    ids=["nothing-installed", "nothing-answers", "unified", "unified-smi", "rocm"],
)
def test_unknown_free_memory_means_the_current_device(box: FakeBox) -> None:
    with box:
        decision = decide()
        assert box.contexts == set()

    assert str(decision.device) == "cuda:0"
    assert "free memory is not known" in decision.reason


def test_what_is_known_of_some_devices_counts() -> None:
    with FakeBox([GPU(free=1, unified=True), GPU(free=5)], pynvml=True):
        assert chosen() == "cuda:1"


# ---- the same answer for the whole process -------------------------------------------------------


@pytest.mark.parametrize("tool", [{"pynvml": True}, {"smi": True}, {}], ids=str)
def test_memory_that_fills_up_later_changes_nothing(tool: dict[str, bool]) -> None:
    with FakeBox(TWINS, **tool) as box:
        first = devicekit.auto()
        box.change(1, free=0.1)
        assert devicekit.auto() == first
        torch.cuda.init()
        box.change(0, reserved=3)
        assert devicekit.auto() == first
        torch.cuda.set_device(1 - first.index)
        assert devicekit.auto() == first
        assert devicekit.auto(min_free=None) == devicekit.auto(min_free=0) == first
        assert devicekit.device("auto") == first


def test_another_environment_may_change_the_answer() -> None:
    with FakeBox(TWINS, pynvml=True):
        assert chosen() == "cuda:1"
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        assert chosen() == "cuda:0"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        assert chosen() == "cpu"
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ["LOCAL_RANK"] = "0"
        assert chosen() == "cuda:0"
        del os.environ["LOCAL_RANK"]
        os.environ["DEVICEKIT_DEVICE"] = "cpu"
        assert chosen() == "cpu"
        del os.environ["DEVICEKIT_DEVICE"]
        assert chosen() == "cuda:1"


def test_other_arguments_are_another_question() -> None:
    with FakeBox([GPU(free=10), GPU(free=70)], pynvml=True) as box:
        assert chosen() == "cuda:1"
        box.change(1, free=0.1)
        box.change(0, free=50)
        assert chosen(min_free="20GiB") == "cuda:0"
        assert chosen(prefer="cpu") == "cpu"
        assert chosen() == "cuda:1"


def test_a_plugin_imported_later_is_found() -> None:
    with FakeBox(built="cpu"):
        assert chosen() == "cpu"
    with FakeBox(plugin=[GPU()]):
        assert chosen() == f"{PLUGIN}:0"


def test_threads_agree_and_log_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "devicekit")
    found: list[torch.device] = []
    barrier = threading.Barrier(6)

    def ask() -> None:
        barrier.wait()
        found.append(devicekit.auto())

    with FakeBox(TWINS, pynvml=True):
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert found == [torch.device("cuda:1")] * 6
    assert len(caplog.records) == 1


def test_the_first_of_two_threads_decides_for_both(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "devicekit")

    class Late(dict[object, Any]):
        """What another thread decides between this one's look and its word."""

        def get(self, *_args: object) -> None:
            return None

    with fake_devices(cuda=2):
        first = decide()
        machine = current_machine()
        machine.decisions = Late(machine.decisions)
        assert decide() is first

    assert len(caplog.records) == 1


# ---- logged once, with the reason ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "options", "message"),
    [
        pytest.param(
            FakeBox(TWINS, pynvml=True),
            {},
            "cuda:1: the most free memory of 2 CUDA devices (70.0 GiB)",
            id="memory",
        ),
        pytest.param(
            FakeBox(TWINS, pynvml=True),
            {"min_free": "20GiB"},
            "cuda:1: the only usable CUDA device "
            "(passed over: cuda:0, 10.0 GiB free of the 20.0 GiB wanted)",
            id="min-free",
        ),
        pytest.param(
            FakeBox(TWINS, pynvml=True, env={"LOCAL_RANK": "0"}),
            {},
            "cuda:0: LOCAL_RANK=0",
            id="rank",
        ),
        pytest.param(
            FakeBox(TWINS, pynvml=True, env={"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "1"}),
            {},
            "cuda:0: the only visible device, LOCAL_RANK=3",
            id="only-visible",
        ),
        pytest.param(
            FakeBox(TWINS, env={"DEVICEKIT_DEVICE": "cuda:1"}),
            {},
            "cuda:1: DEVICEKIT_DEVICE=cuda:1",
            id="variable",
        ),
        pytest.param(
            FakeBox(TWINS),
            {},
            "cuda:0: the current CUDA device; free memory is not known",
            id="unknown",
        ),
        pytest.param(
            FakeBox(xpu=[GPU()]), {}, "xpu:0: the only usable XPU device", id="only-usable"
        ),
        pytest.param(
            FakeBox(),
            {"prefer": ("mps", "cuda")},
            "cpu: no usable accelerator among those preferred (mps, cuda) "
            "(passed over: mps, build without it; cuda, no driver)",
            id="nothing",
        ),
        pytest.param(FakeBox(TWINS), {"prefer": "cpu"}, "cpu: preferred", id="preferred"),
        pytest.param(
            FakeBox([GPU(capability=(5, 0)), GPU(mode="prohibited")], pynvml=True),
            {},
            "cpu: no usable accelerator (passed over: cuda:0, architecture not in this build; "
            "cuda:1, busy)",
            id="all-refused",
        ),
    ],
)
def test_the_decision_is_logged_once(
    box: FakeBox, options: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with box:
        for _ in range(3):
            devicekit.auto(**options)

    records = [record for record in caplog.records if record.name == "devicekit"]
    assert [record.getMessage() for record in records] == [f"auto() chose {message}"]
    assert records[0].levelno == logging.INFO
    assert logging.getLogger("devicekit").handlers == []
    assert logging.getLogger("devicekit").level == logging.NOTSET


def test_the_device_in_use_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "devicekit")
    with FakeBox(TWINS):
        torch.cuda.set_device(1)
        devicekit.auto()

    assert caplog.messages == ["auto() chose cuda:1: this process already uses it"]


def test_an_error_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        fake_devices(environ={"DEVICEKIT_DEVICE": "gpu"}),
        pytest.raises(devicekit.InvalidDeviceError, match="DEVICEKIT_DEVICE"),
    ):
        devicekit.auto()

    assert caplog.records == []


# ---- nothing is started, nothing is written ------------------------------------------------------


@pytest.mark.parametrize("tool", ["pynvml", "smi"])
def test_a_child_can_be_forked_afterwards(tool: str) -> None:
    with FakeBox(TWINS, **{tool: True}) as box:
        devicekit.auto()
        devicekit.auto(min_free="1GiB", prefer=("cuda", "cpu"))
        devicekit.devices()
        devicekit.device("cuda:1")

        assert not box.fork_poisoned
        assert not [call for call in box.calls if call.startswith(("cuda", "context", "props"))]


def test_a_build_that_is_no_release_is_asked_for_its_architectures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0a0+gitabc")
    with FakeBox(TWINS, pynvml=True) as box:
        assert chosen() == "cuda:1"
        assert "getArchFlags" in box.calls
        assert box.contexts == set()


@pytest.mark.parametrize(
    "box",
    [
        FakeBox(TWINS),
        FakeBox(TWINS, pynvml=True),
        FakeBox(UNEQUAL, smi=True),
        FakeBox(TWINS, built="rocm"),
        FakeBox(TWINS, init_error=CUDA_UNKNOWN_ERROR),
        FakeBox(xpu=[GPU(), GPU()]),
        FakeBox(mps=True),
        FakeBox(mtia=[GPU()]),
        FakeBox(plugin=[GPU(), GPU()]),
    ],
    ids=["cuda", "nvml", "smi", "rocm", "broken", "xpu", "mps", "mtia", "plugin"],
)
def test_no_context_is_made_and_nothing_is_written(box: FakeBox) -> None:
    with box:
        before = dict(os.environ)
        devicekit.auto(min_free=1)
        devicekit.devices()

        assert box.contexts == set()
        assert dict(os.environ) == before


# ---- on fake devices -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "cpu"),
        ({"cuda": 0}, "cpu"),
        ({"cuda": 1}, "cuda:0"),
        ({"cuda": 3, "free_memory": ["1GiB", "3GiB", "2GiB"]}, "cuda:1"),
        ({"cuda": 2, "driver": None}, "cpu"),
        ({"cuda": 2, "driver": "12.4"}, "cpu"),
        ({"cuda": 2, "build": None}, "cpu"),
        ({"cuda": 2, "capability": [(6, 1), (9, 0)], "free_memory": ["9GiB", "1GiB"]}, "cuda:1"),
        ({"cuda": 2, "environ": {"CUDA_VISIBLE_DEVICES": ""}}, "cpu"),
        ({"cuda": 2, "environ": {"LOCAL_RANK": "1"}}, "cuda:1"),
        ({"rocm": 2}, "cuda:0"),
        ({"xpu": 2, "free_memory": [1, 2]}, "xpu:1"),
        ({"mps": 1}, "mps:0"),
        ({"mps": 0}, "cpu"),
        ({"hpu": 1}, "hpu:0"),
        ({"mtia": 1}, "mtia:0"),
        ({"cuda": 1, "xpu": 1}, "cuda:0"),
        ({"cuda": 0, "xpu": 1}, "xpu:0"),
    ],
    ids=str,
)
def test_on_fake_devices(options: dict[str, Any], expected: str) -> None:
    with fake_devices(**options):
        assert chosen() == expected


def test_a_fake_block_decides_for_itself() -> None:
    with fake_devices(cuda=2, free_memory=["1GiB", "2GiB"]):
        assert chosen() == "cuda:1"
    with fake_devices(cuda=2, free_memory=["2GiB", "1GiB"]):
        assert chosen() == "cuda:0"


def test_tasks_decide_for_themselves() -> None:
    async def ask(**options: Any) -> str:
        with fake_devices(**options):
            await asyncio.sleep(0)
            return chosen()

    async def both() -> list[str]:
        return list(await asyncio.gather(ask(cuda=1), ask(mps=1), ask()))

    assert asyncio.run(both()) == ["cuda:0", "mps:0", "cpu"]


def test_auto_takes_keywords_only() -> None:
    with pytest.raises(TypeError, match=re.escape("takes 0 positional arguments but 1")):
        devicekit.auto("cuda")  # type: ignore[misc]


def test_the_cpu_is_explained_by_what_was_wanted() -> None:
    with fake_devices(cuda=1, free_memory="4GiB"):
        preferred = decide(prefer=("xpu",))
        roomy = decide(min_free="8GiB")

    assert preferred.reason == "no usable accelerator among those preferred (xpu)"
    assert roomy.reason == "no usable accelerator with 8.0 GiB free"
