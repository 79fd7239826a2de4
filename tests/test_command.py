"""`python -m devicekit`: its page, its exit status, its JSON, and what it must not tell."""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from child import run_python
from fakebox import CUDA_UNKNOWN_ERROR, GPU, FakeBox

import devicekit
from devicekit import __main__ as command
from devicekit._backends import this_machine
from devicekit._backends.machine import Machine
from devicekit._device.checking import _FOUND
from devicekit.testing import fake_devices

ON_A_MACHINE_WITHOUT_GPU = pytest.mark.skipif(
    torch.accelerator.current_accelerator() is not None, reason="for a build for the CPU only"
)

TORCH = torch.__version__.partition("+")[0]

# The documented schema: see `Diagnosis.to_dict`.
TEXT, NUMBER, TRUTH, NONE = str, int, bool, type(None)
SCHEMA: dict[str, Any] = {
    "schema": NUMBER,
    "devicekit": TEXT,
    "python": TEXT,
    "system": TEXT,
    "torch": {
        "version": TEXT,
        "cuda": (TEXT, NONE),
        "rocm": (TEXT, NONE),
        "xpu": (TEXT, NONE),
        "mps": TRUTH,
    },
    "driver": {"version": (TEXT, NONE), "cuda": (TEXT, NONE)},
    "auto": {"device": (TEXT, NONE), "reason": TEXT, "passed_over": [TEXT]},
    "findings": [{"code": TEXT, "severity": TEXT, "about": TEXT, "cause": TEXT, "remedy": TEXT}],
    "devices": [
        {
            "device": TEXT,
            "name": TEXT,
            "total_memory": (NUMBER, NONE),
            "free_memory": (NUMBER, NONE),
            "capability": (list, NONE),
            "bfloat16": (TRUTH, NONE),
            "tensor_cores": (TRUTH, NONE),
            "usable": TRUTH,
            "reason": (TEXT, NONE),
        }
    ],
    "variables": dict,
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test meets another machine in this process: nothing found or decided is kept."""
    this_machine().decisions.clear()
    _FOUND.clear()
    yield
    this_machine().decisions.clear()
    _FOUND.clear()


def run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    done = run_python("-m", "devicekit", *arguments, cwd=cwd, **environ)
    assert done.stderr == "" or done.returncode == 2
    return done


def assert_fits(value: Any, schema: Any, where: str = "page") -> None:
    if isinstance(schema, dict):
        assert value.keys() == schema.keys(), where
        for key, inner in schema.items():
            assert_fits(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for item in value:
            assert_fits(item, schema[0], f"{where}[]")
    else:
        assert isinstance(value, schema), where


# ---- this machine, in a process of its own -------------------------------------------------------


def test_prints_a_page_and_exits_with_0(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)

    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"devicekit  {devicekit.__version__}, Python ")
    assert lines[1].startswith(f"torch      {torch.__version__}, built for ")
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in done.stdout


@ON_A_MACHINE_WITHOUT_GPU
def test_is_calm_on_a_machine_without_an_accelerator(tmp_path: Path) -> None:
    done = run("--json", cwd=tmp_path)

    assert done.returncode == 0
    told = json.loads(done.stdout)["findings"]
    assert [finding["severity"] for finding in told] == ["note"] * len(told)


@ON_A_MACHINE_WITHOUT_GPU
def test_require_cuda_exits_with_1_and_says_what_is_missing(tmp_path: Path) -> None:
    done = run("--require", "cuda", cwd=tmp_path)

    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last == (
        "cuda is required, and cannot be used here. "
        f"This build of torch ({torch.__version__}) has no CUDA."
    )


def test_require_cpu_exits_with_0(tmp_path: Path) -> None:
    done = run("--require", "cpu", cwd=tmp_path)

    assert done.returncode == 0
    assert done.stdout.endswith("\ncpu is usable, as required.\n")


def test_json_is_all_there_is_and_fits_the_schema(tmp_path: Path) -> None:
    done = run("--json", cwd=tmp_path)

    data = json.loads(done.stdout)
    assert_fits(data, SCHEMA)
    assert data["schema"] == 1


def test_version(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, f"devicekit {devicekit.__version__}\n")


@pytest.mark.parametrize(
    ("required", "hint"),
    [
        ("gpu", ""),
        ("3", ""),
        ("meta", ""),
        ("auto", ""),
        ("AUTO", ""),
        ("", ""),
        ("cuda,cpu", ""),
        ("100%d", ""),
        ("CUDA", " Did you mean 'cuda'?"),
        ("cuda0", " Did you mean 'cuda:0'?"),
    ],
)
def test_a_device_that_cannot_be_missing_is_refused(
    required: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_devices(), pytest.raises(SystemExit, match="2"):
        command.main(["--require", required])

    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1] == (
        f"devicekit: error: argument --require: {required!r} is no device that can be missing: "
        f"expected a type, and an index if it matters, such as cuda, cuda:1, xpu, mps or cpu.{hint}"
    )


def test_arguments_that_are_wrong_exit_with_2(tmp_path: Path) -> None:
    done = run("--require", "auto", cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert "'auto' is no device that can be missing" in done.stderr


def test_tells_nothing_private(tmp_path: Path) -> None:
    home = "/home/ann.example/models"
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    environ = {"CUDA_VISIBLE_DEVICES": uuid, "DEVICEKIT_DEVICE": home, "HOME": home}

    page = run(cwd=tmp_path, **environ).stdout + run("--json", cwd=tmp_path, **environ).stdout

    assert "'GPU-01234567...'" in page
    assert uuid not in page
    assert "ann.example" not in page
    for name in {getpass.getuser(), socket.gethostname(), platform.node()} - {"root", "localhost"}:
        assert not re.search(rf"\b{re.escape(name)}\b", page)


def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path) -> None:
    program = f"{sys.executable} -W error -m devicekit --json | true"
    path = str(Path(devicekit.__file__).parents[1])

    done = subprocess.run(
        program,
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.stderr == ""


def test_a_terminal_without_the_characters_gets_marks(tmp_path: Path) -> None:
    done = run(cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0", CUDA_VISIBLE_DEVICES="grün")

    assert "'gr?n'" in done.stdout


# ---- other machines, in this process -------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "colored"),
    [
        ({"NO_COLOR": "", "TERM": "xterm"}, True),
        ({"NO_COLOR": "1", "TERM": "xterm"}, False),
        ({"NO_COLOR": "", "TERM": "dumb"}, False),
    ],
)
def test_color_is_for_a_terminal_that_wants_it(
    environ: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)

    with fake_devices(environ=environ):
        command.main([])

    assert ("\x1b[" in terminal.getvalue()) is colored


@pytest.mark.parametrize(
    ("required", "hardware", "status", "last"),
    [
        ("cuda", {"cuda": 2}, 0, "cuda is usable, as required."),
        ("cuda:1", {"cuda": 2}, 0, "cuda:1 is usable, as required."),
        (
            "cuda:2",
            {"cuda": 2},
            1,
            "cuda:2 is required, and cannot be used here. This process sees 2 cuda devices, "
            "numbered from 0.",
        ),
        (
            "cuda",
            {"cuda": 1, "driver": "11.4"},
            1,
            "cuda is required, and cannot be used here. The NVIDIA driver supports CUDA up to "
            "11.4, and this build of torch is for CUDA 13.0.",
        ),
        (
            "cuda",
            {"cuda": 0},
            1,
            "cuda is required, and cannot be used here. This build of torch is for CUDA 13.0, and "
            "no NVIDIA GPU and no driver for one are found here.",
        ),
        ("mps", {"mps": 1}, 0, "mps is usable, as required."),
        (
            "mps",
            {"mps": 0},
            1,
            "mps is required, and cannot be used here. This build of torch has MPS, and this Mac "
            "has no GPU that it can use: it needs Apple silicon, or an AMD GPU, with a recent "
            "macOS, and no virtual machine.",
        ),
        ("xpu:0", {"xpu": 1}, 0, "xpu:0 is usable, as required."),
        (
            "xpu",
            {"xpu": 0},
            1,
            "xpu is required, and cannot be used here. No usable xpu device is found here.",
        ),
        (
            "npu:1",
            {},
            1,
            "npu:1 is required, and cannot be used here. The plugin torch_npu is not imported.",
        ),
        (
            "mps",
            {},
            1,
            "mps is required, and cannot be used here. "
            f"This build of torch ({TORCH}+cpu) has no MPS, which is for the GPUs of Apple.",
        ),
        (
            "cuda",
            {"mps": 1},
            1,
            "cuda is required, and cannot be used here. "
            f"This build of torch ({TORCH}+cpu) has no CUDA.",
        ),
        (
            "opencl",
            {"cuda": 1},
            1,
            "opencl is required, and cannot be used here. Torch has no more than the name of this "
            "type, and no device of it in any release.",
        ),
    ],
)
def test_require(
    required: str,
    hardware: dict[str, Any],
    status: int,
    last: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_devices(**hardware):
        assert command.main(["--require", required]) == status

    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize("asked", ["accelerator", "accelerator_types"])
def test_require_tells_of_a_question_that_failed(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        msg = "/home/ann.example/plugin is broken."
        raise OSError(msg)

    monkeypatch.setattr(Machine, asked, fail)

    with FakeBox(xpu=[GPU()]):
        assert command.main(["--require", "npu"]) == 1
        assert command.main(["--require", "xpu"]) == 1

    assert capsys.readouterr().out.splitlines()[-1] == (
        "xpu is required, and cannot be used here. The question for it ended in an error: "
        "OSError: ~/plugin is broken."
    )


def test_require_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeBox([GPU(), GPU()], pynvml=True, init_error=CUDA_UNKNOWN_ERROR):
        status = command.main(["--json", "--require", "cuda:0"])

    data = json.loads(capsys.readouterr().out)
    required = data.pop("required")
    assert status == 1
    assert_fits(data, SCHEMA)
    assert (required["device"], required["usable"]) == ("cuda:0", False)
    assert required["missing"].startswith(
        "cuda:0 is required, and cannot be used here. CUDA does not start: CUDA unknown error"
    )


def test_json_of_a_machine_with_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_devices(cuda=2, environ={"CUDA_VISIBLE_DEVICES": "1"}):
        status = command.main(["--json"])

    data = json.loads(capsys.readouterr().out)
    assert status == 0
    assert_fits(data, SCHEMA)
    assert data["driver"]["cuda"] == "13.0"
    assert data["auto"]["device"] == "cuda:0"
    assert data["devices"][0] == {
        "device": "cuda:0",
        "name": "Fake GPU",
        "total_memory": 80 << 30,
        "free_memory": 79 << 30,
        "capability": [9, 0],
        "bfloat16": True,
        "tensor_cores": True,
        "usable": True,
        "reason": None,
    }
    assert data["variables"] == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is full")
@pytest.mark.parametrize("redirect", [">&-", "> /dev/full"])
def test_nowhere_to_write_to_is_no_traceback(redirect: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m devicekit {redirect}'],
        env={**os.environ, "PYTHONPATH": str(Path(devicekit.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "Traceback" not in done.stderr
