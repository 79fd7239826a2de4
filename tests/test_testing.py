"""fake_devices(): other hardware inside a block, and nothing of it outside."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

import devicekit
import devicekit.testing
from devicekit._backends import current_machine
from devicekit.testing import fake_devices


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the real environment count inside a block; here there are none."""
    for name in ("DEVICEKIT_DEVICE", "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)


def listed() -> list[str]:
    return [str(info.device) for info in devicekit.devices()[:-1]]


def refusal(spec: Any) -> devicekit.DeviceUnavailableError:
    with pytest.raises(devicekit.DeviceUnavailableError, match="is not available") as caught:
        devicekit.device(spec)
    return caught.value


# ---- counts and facts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, []),
        ({"cuda": 0}, []),
        ({"cuda": 1}, ["cuda:0"]),
        ({"cuda": 3}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"rocm": 2}, ["cuda:0", "cuda:1"]),
        ({"rocm": 0}, []),
        ({"xpu": 2}, ["xpu:0", "xpu:1"]),
        ({"mps": 1}, ["mps:0"]),
        ({"mps": 0}, []),
        ({"mtia": 2}, ["mtia:0", "mtia:1"]),
        ({"hpu": 8}, [f"hpu:{i}" for i in range(8)]),
        ({"cuda": 1, "xpu": 1, "hpu": 1}, ["cuda:0", "xpu:0", "hpu:0"]),
    ],
    ids=str,
)
def test_counts(counts: dict[str, int], expected: list[str]) -> None:
    with fake_devices(**counts):
        assert listed() == expected
        for name in expected:
            assert str(devicekit.device(name)) == name
        assert str(devicekit.auto()) == (expected[0] if expected else "cpu")


def test_the_largest_machine() -> None:
    with fake_devices(cuda=128):
        assert devicekit.device("cuda:127") == torch.device("cuda:127")
        assert refusal("cuda:128").reason == "index out of range"


def test_facts_of_each_device() -> None:
    with fake_devices(
        cuda=2,
        names=["NVIDIA GeForce GTX 1660", "NVIDIA H100"],
        total_memory=["6GiB", 80 << 30],
        free_memory=["5GiB", "1.5GB"],
        capability=[(7, 5), (9, 0)],
    ):
        small, large, _ = devicekit.devices()

    assert small == devicekit.DeviceInfo(
        device=torch.device("cuda:0"),
        name="NVIDIA GeForce GTX 1660",
        total_memory=6 << 30,
        free_memory=5 << 30,
        capability=(7, 5),
        bfloat16=False,
        tensor_cores=False,
    )
    assert large == devicekit.DeviceInfo(
        device=torch.device("cuda:1"),
        name="NVIDIA H100",
        total_memory=80 << 30,
        free_memory=1_500_000_000,
        capability=(9, 0),
        bfloat16=True,
        tensor_cores=True,
    )


def test_one_value_for_all() -> None:
    with fake_devices(cuda=2, xpu=1, names="X", total_memory=5, free_memory="3", capability=(8, 0)):
        infos = devicekit.devices()[:-1]

    assert [info.name for info in infos] == ["X"] * 3
    assert [info.total_memory for info in infos] == [5] * 3
    assert [info.free_memory for info in infos] == [3] * 3
    assert [info.capability for info in infos] == [(8, 0), (8, 0), None]


def test_values_go_to_the_types_in_their_order() -> None:
    with fake_devices(hpu=1, cuda=2, mps=1, names=list("abcd")):
        found = [f"{info.device} {info.name}" for info in devicekit.devices()[:-1]]

    assert found == ["cuda:0 a", "cuda:1 b", "mps:0 c", "hpu:0 d"]


def test_the_cpu_stays_the_real_one() -> None:
    real = devicekit.devices()[-1]
    with fake_devices(cuda=1):
        fake = devicekit.devices()[-1]

    assert (fake.device, fake.name, fake.total_memory) == (
        real.device,
        real.name,
        real.total_memory,
    )


def test_free_memory_of_a_fake_device() -> None:
    with fake_devices(cuda=2, free_memory=["1GiB", "2GiB"]):
        machine = current_machine()
        assert machine.free_memory(torch.device("cuda:1")) == 2 << 30
        assert machine.free_memory(torch.device("cuda:7")) is None
        assert machine.current_index("cuda") == 0


# ---- why a device cannot be used -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "spec", "reason", "cause"),
    [
        ({}, "cuda", "build without it", "has no CUDA"),
        ({"mps": 1}, "cuda", "build without it", "has no CUDA"),
        ({"cuda": 2, "build": None}, "cuda", "build without it", "has no CUDA"),
        ({"cuda": 1}, "xpu", "build without it", "has no XPU"),
        ({}, "hpu", "plugin not installed", "habana_frameworks.torch is not imported"),
        ({}, "npu", "plugin not installed", "torch_npu is not imported"),
        ({}, "privateuseone", "plugin not installed", "plugin for privateuseone is not"),
        ({"cuda": 0}, "cuda", "no driver", "has no NVIDIA driver"),
        ({"cuda": 1, "driver": None}, "cuda", "no driver", "has no NVIDIA driver"),
        ({"cuda": 1, "driver": "12.8"}, "cuda", "driver too old", "(CUDA 13.0)"),
        ({"cuda": 1, "build": "12.8", "driver": "11.4"}, "cuda", "driver too old", "(CUDA 12.8)"),
        ({"rocm": 0}, "cuda", "none visible", "the driver sees no ROCm device"),
        ({"mps": 0}, "mps", "none visible", "the driver sees no MPS device"),
        ({"xpu": 0}, "xpu", "none visible", "the driver sees no XPU device"),
        ({"cuda": 1}, "cuda:1", "index out of range", "sees 1 CUDA device,"),
        ({"cuda": 2}, 2, "index out of range", "sees 2 CUDA devices,"),
        ({"xpu": 1}, 1, "index out of range", "sees 1 XPU device,"),
        (
            {"cuda": 2, "environ": {"CUDA_VISIBLE_DEVICES": "1"}},
            "cuda:1",
            "hidden by a visibility variable",
            "because of CUDA_VISIBLE_DEVICES='1'",
        ),
        (
            {"cuda": 2, "environ": {"CUDA_VISIBLE_DEVICES": "none"}},
            "cuda",
            "hidden by a visibility variable",
            "CUDA_VISIBLE_DEVICES='none' leaves no CUDA device visible",
        ),
        (
            {"cuda": 1, "capability": (6, 1), "names": "GTX 1080"},
            "cuda",
            "architecture not in this build",
            "GTX 1080 has compute capability 6.1",
        ),
        (
            {"cuda": 1, "capability": (9, 0), "architectures": ["sm_100"]},
            "cuda",
            "architecture not in this build",
            "has kernels for sm_100 only",
        ),
    ],
    ids=str,
)
def test_reasons(options: dict[str, Any], spec: Any, reason: str, cause: str) -> None:
    with fake_devices(**options):
        error = refusal(spec)

    assert error.reason == reason
    assert cause in str(error)


@pytest.mark.parametrize(
    "options",
    [
        {"driver": "13.0"},
        {"driver": "13.9"},
        {"driver": "14.0"},
        {"build": "13.4", "driver": "13.0"},  # minor versions are compatible
        {"build": "12.8", "driver": "12.0"},
        {"architectures": ["sm_75", "compute_75"]},
        {"architectures": []},
        {"capability": (9, 9)},
    ],
    ids=str,
)
def test_what_can_be_used(options: dict[str, Any]) -> None:
    with fake_devices(cuda=1, **options):
        assert devicekit.device("cuda") == torch.device("cuda:0")


def test_amd_gpus_have_no_compute_capability_to_fail() -> None:
    with fake_devices(rocm=1, capability=(1, 0), driver=None):
        assert devicekit.auto() == torch.device("cuda:0")


# ---- the environment -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "environ", "names"),
    [
        ({"cuda": 3}, {"CUDA_VISIBLE_DEVICES": "2,0"}, ["c", "a"]),
        ({"cuda": 3}, {"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, ["b"]),
        ({"cuda": 3}, {"CUDA_VISIBLE_DEVICES": "0,0"}, []),
        ({"rocm": 3}, {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["c"]),
        ({"xpu": 3}, {"ZE_AFFINITY_MASK": "2,0"}, ["a", "c"]),
        ({"xpu": 3}, {"CUDA_VISIBLE_DEVICES": ""}, ["a", "b", "c"]),
    ],
    ids=str,
)
def test_variables_hide_fake_devices(
    options: dict[str, int], environ: dict[str, str], names: list[str]
) -> None:
    with fake_devices(**options, names=["a", "b", "c"], environ=environ):
        assert [info.name for info in devicekit.devices()[:-1]] == names


def test_nothing_is_written_to_the_environment() -> None:
    before = dict(os.environ)
    with fake_devices(cuda=2, environ={"CUDA_VISIBLE_DEVICES": "1", "DEVICEKIT_DEVICE": "cuda"}):
        assert devicekit.auto() == torch.device("cuda:0")
        assert dict(os.environ) == before

    assert dict(os.environ) == before


def test_the_real_environment_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_devices(cuda=2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert listed() == ["cuda:0"]
        with fake_devices(cuda=2, environ={"CUDA_VISIBLE_DEVICES": "0,1"}):
            assert listed() == ["cuda:0", "cuda:1"]


def test_the_mapping_is_copied() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    with fake_devices(cuda=2, environ=environ):
        environ["CUDA_VISIBLE_DEVICES"] = ""
        assert listed() == ["cuda:0"]


# ---- how long and where it holds -----------------------------------------------------------------


def test_it_ends_with_the_block() -> None:
    before = current_machine()
    with fake_devices(cuda=1) as nothing:
        assert nothing is None
        assert current_machine() is not before

    assert current_machine() is before


def test_it_ends_with_an_error() -> None:
    before = current_machine()
    with pytest.raises(LookupError, match="out"), fake_devices(cuda=1):
        raise LookupError("out")  # noqa: EM101

    assert current_machine() is before


@fake_devices(cuda=2, free_memory=["1GiB", "2GiB"])
def ask(spec: str = "auto") -> torch.device:
    """Return a device of the fake machine."""
    return devicekit.device(spec)


def test_as_a_decorator() -> None:
    assert [str(ask()), str(ask("cuda")), str(ask())] == ["cuda:1", "cuda:0", "cuda:1"]
    assert ask.__name__ == "ask"
    assert inspect.getdoc(ask) == "Return a device of the fake machine."


def test_blocks_nest() -> None:
    with fake_devices(cuda=2):
        with fake_devices(mps=1):
            assert listed() == ["mps:0"]
            with fake_devices():
                assert listed() == []
            assert listed() == ["mps:0"]
        assert listed() == ["cuda:0", "cuda:1"]


def test_other_threads_do_not_see_it() -> None:
    here: list[list[str]] = []
    there: list[object] = []

    def other() -> None:
        there.append(current_machine())
        with fake_devices(xpu=1):
            there.append(listed())

    before = current_machine()
    with fake_devices(cuda=1):
        # A fresh context is what a thread gets, unless Python was built without the GIL.
        thread = threading.Thread(target=contextvars.Context().run, args=(other,))
        thread.start()
        thread.join()
        here.append(listed())

    assert there == [before, ["xpu:0"]]
    assert here == [["cuda:0"]]


def test_other_tasks_do_not_see_it() -> None:
    async def one(count: int) -> list[str]:
        with fake_devices(cuda=count):
            await asyncio.sleep(0.001)
            return listed()

    async def main() -> list[list[str]]:
        return await asyncio.gather(*(one(count) for count in range(4)))

    assert [len(found) for found in asyncio.run(main())] == [0, 1, 2, 3]


def test_a_task_started_inside_sees_it() -> None:
    async def inner() -> list[str]:
        return listed()

    async def main() -> list[str]:
        with fake_devices(cuda=1):
            task = asyncio.create_task(inner())
        return await task

    assert asyncio.run(main()) == ["cuda:0"]


# ---- wrong arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuda": 2, "names": ["a"]}, "names has 1 values for 2 devices: expected one value"),
        ({"cuda": 1, "names": []}, "names has 0 values for 1 devices"),
        ({"names": ["a"]}, "names has 1 values for 0 devices"),
        ({"cuda": 2, "total_memory": [1, 2, 3]}, "total_memory has 3 values for 2 devices"),
        ({"cuda": 2, "free_memory": ("1GiB",)}, "free_memory has 1 values for 2 devices"),
        ({"cuda": 1, "capability": [(8, 0), (9, 0)]}, "capability has 2 values for 1 devices"),
        ({"cuda": 1, "mps": 1, "names": ["a"]}, "names has 1 values for 2 devices"),
        ({"cuda": 1, "free_memory": "much"}, "'much' is not an amount of memory"),
        ({"cuda": 1, "total_memory": -1}, "-1 is not an amount of memory"),
        ({"cuda": -1}, "-1 devices of type cuda: expected a number from 0 to 128"),
        ({"rocm": 129}, "129 devices of type cuda: expected a number from 0 to 128"),
        ({"mps": 2}, "2 devices of type mps: expected a number from 0 to 1"),
        ({"cuda": 1, "rocm": 1}, "cuda and rocm are both given"),
        ({"cuda": 1, "driver": "new"}, "driver is 'new': expected a version such as '13.0', or No"),
        ({"cuda": 1, "driver": ""}, "driver is '': expected a version"),
        ({"driver": "13."}, "driver is '13.': expected a version"),
        ({"build": "cu130"}, "build is 'cu130': expected a version such as '13.0', or None"),
        ({"cuda": 1, "free_memory": True}, "True is not an amount of memory"),
    ],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    before = current_machine()
    with pytest.raises(ValueError, match=message), fake_devices(**options):
        pass

    assert current_machine() is before


COUNT = "expected how many devices there are, or None"
PAIR = r"expected a pair such as \(9, 0\), or one for each device"
SIZE = "expected a number of bytes or a text such as '8GiB', or one for each device"
NAME = "expected a text, or one for each device"
ARCHITECTURES = r"expected texts such as \('sm_80', 'sm_90'\)"
ENVIRON = "expected a mapping of names to texts, such as {'LOCAL_RANK': '1'}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuda": "2"}, f"cuda is '2': {COUNT}"),
        ({"cuda": 2.0}, f"cuda is 2.0: {COUNT}"),
        ({"rocm": True}, f"rocm is True: {COUNT}"),
        ({"mps": False}, f"mps is False: {COUNT}"),
        ({"hpu": [1]}, rf"hpu is \[1\]: {COUNT}"),
        ({"cuda": 1, "capability": "8.0"}, f"capability is '8.0': {PAIR}"),
        ({"cuda": 1, "capability": 8}, f"capability is 8: {PAIR}"),
        ({"cuda": 1, "capability": 8.0}, f"capability is 8.0: {PAIR}"),
        ({"cuda": 1, "capability": None}, f"capability is None: {PAIR}"),
        ({"cuda": 1, "capability": (8,)}, rf"capability is \(8,\): {PAIR}"),
        ({"cuda": 1, "capability": (8, 0, 0)}, rf"capability is \(8, 0, 0\): {PAIR}"),
        ({"cuda": 1, "capability": [8, 0]}, rf"capability is \[8, 0\]: {PAIR}"),
        ({"cuda": 1, "capability": (True, 0)}, rf"capability is \(True, 0\): {PAIR}"),
        ({"cuda": 1, "capability": ["8.0"]}, rf"capability is \['8.0'\]: {PAIR}"),
        ({"cuda": 1, "capability": [(8, 0.0)]}, rf"capability is \[\(8, 0.0\)\]: {PAIR}"),
        ({"cuda": 1, "names": 3}, f"names is 3: {NAME}"),
        ({"cuda": 1, "names": [3]}, rf"names is \[3\]: {NAME}"),
        ({"names": None}, f"names is None: {NAME}"),
        ({"cuda": 1, "total_memory": None}, f"total_memory is None: {SIZE}"),
        ({"cuda": 1, "total_memory": [None]}, rf"total_memory is \[None\]: {SIZE}"),
        ({"cuda": 1, "free_memory": 5.0}, f"free_memory is 5.0: {SIZE}"),
        ({"cuda": 1, "driver": 13}, "driver is 13: expected a version such as '13.0', or None"),
        ({"cuda": 1, "build": 13.0}, "build is 13.0: expected a version such as '13.0', or None"),
        ({"environ": [("A", "b")]}, rf"environ is \[\('A', 'b'\)\]: {ENVIRON}"),
        ({"environ": "A=b"}, f"environ is 'A=b': {ENVIRON}"),
        ({"environ": {1: "b"}}, f"environ is {{1: 'b'}}: {ENVIRON}"),
        ({"environ": {"A": None}}, f"environ is {{'A': None}}: {ENVIRON}"),
        ({"architectures": 80}, f"architectures is 80: {ARCHITECTURES}"),
        ({"architectures": [80]}, rf"architectures is \[80\]: {ARCHITECTURES}"),
        ({"architectures": None}, f"architectures is None: {ARCHITECTURES}"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind(options: dict[str, Any], message: str) -> None:
    before = current_machine()
    with pytest.raises(TypeError, match=rf"^{message}\.$"), fake_devices(**options):
        pass

    assert current_machine() is before


def test_numbers_of_numpy_and_versions_of_every_form() -> None:
    with fake_devices(cuda=np.int64(2), build="13", driver="13.0.1"):
        assert listed() == ["cuda:0", "cuda:1"]
        assert devicekit.diagnose().to_dict()["driver"]["cuda"] == "13.0"
    with fake_devices(cuda=1, driver="13"):
        assert devicekit.diagnose().to_dict()["driver"]["cuda"] == "13.0"
    with fake_devices(rocm=1, build="6.2.41133-dd7f95766"):
        assert listed() == ["cuda:0"]


def test_arguments_are_keywords() -> None:
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        fake_devices(2)  # type: ignore[misc]


# ---- on its own ----------------------------------------------------------------------------------


def test_it_needs_no_pytest_and_starts_nothing() -> None:
    program = """
import sys
sys.modules["pytest"] = None
import devicekit, torch
from devicekit.testing import fake_devices
with fake_devices(cuda=2, free_memory=["1GiB", "2GiB"]):
    assert str(devicekit.auto()) == "cuda:1", devicekit.auto()
    assert str(devicekit.device("cuda")) == "cuda:0"
assert not torch.cuda.is_initialized()
print("done")
"""

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_what_is_public() -> None:
    assert devicekit.testing.__all__ == ["fake_devices"]
    assert all(
        parameter.kind is inspect.Parameter.KEYWORD_ONLY
        for parameter in inspect.signature(fake_devices).parameters.values()
    )


def test_values_of_variables_may_be_numbers_and_architectures_one_text() -> None:
    with fake_devices(cuda=4, environ={"LOCAL_RANK": 3}, architectures="sm_80 sm_90"):  # type: ignore[dict-item]
        assert str(devicekit.auto()) == "cuda:3"
    with fake_devices(cuda=1, architectures="sm_50", capability=(9, 0)):
        assert not devicekit.devices()[0].usable
