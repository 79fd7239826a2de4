"""What importing and asking does to a process: nothing that it would notice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from child import run_python

# Written to a program that has imported torch itself, so that only what devicekit adds is seen.
SURROUNDINGS = """
import json, logging, os, sys, threading, warnings, random
import torch

def surroundings():
    root = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "cuda started": torch.cuda.is_initialized(),
        "default device": str(torch.get_default_device()),
        "default dtype": str(torch.get_default_dtype()),
        "made by default on": str(torch.empty(0).device),
        "root logger": [root.level, [repr(h) for h in root.handlers], root.disabled],
        "own logger": [
            [logging.getLogger("devicekit").level, logging.getLogger("devicekit").propagate],
            [repr(h) for h in logging.getLogger("devicekit").handlers],
        ],
        "logging stopped below": logging.root.manager.disable,
        "warning filters": [repr(f) for f in warnings.filters],
        "threads": threading.active_count(),
        "seed of torch": torch.initial_seed(),
        "state of random": hash(random.getstate()),
        "import path": list(sys.path),
        "working folder": os.getcwd(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
    }

before, modules = surroundings(), set(sys.modules)
"""

REPORT = """
after = surroundings()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
print(json.dumps({"changed": changed, "added": sorted(set(sys.modules) - modules)}))
"""

CALLS = {
    "import": "",
    "auto": "devicekit.auto()",
    "devices": "devicekit.devices()",
    "device": "devicekit.device('cpu')",
    "testing": "import devicekit.testing",
    "refusal": "\n".join(
        [
            "for spec in ('gpu', 'cuda', 'cuda:99', 'mps', 'xpu', 'npu', 0):",
            "    try:",
            "        devicekit.device(spec)",
            "    except devicekit.DeviceError:",
            "        pass",
        ]
    ),
}


def after(code: str, cwd: Path) -> dict[str, Any]:
    """Return what changed in a fresh process that imports devicekit and runs the code."""
    program = "\n".join([SURROUNDINGS, "import devicekit", code, REPORT])

    done = run_python("-c", program, cwd=cwd)

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 1, f"something was printed: {done.stdout}"
    report: dict[str, Any] = json.loads(lines[0])
    return report


@pytest.mark.parametrize("code", CALLS.values(), ids=CALLS.keys())
def test_leaves_the_process_as_it_was(code: str, tmp_path: Path) -> None:
    report = after(code, tmp_path)

    assert report["changed"] == {}


def test_importing_pulls_in_no_third_party_module(tmp_path: Path) -> None:
    report = after("", tmp_path)

    added = {name.partition(".")[0] for name in report["added"]}
    assert added - sys.stdlib_module_names <= {"devicekit", "torch", "typing_extensions"}


def test_importing_does_not_start_the_compiler(tmp_path: Path) -> None:
    report = after("", tmp_path)

    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "pynvml")
    assert [name for name in report["added"] if name.startswith(heavy)] == []


def test_importing_leaves_what_few_programs_use_until_it_is_used(tmp_path: Path) -> None:
    report = after("", tmp_path)

    waits = ("_backends.machine", "_diagnose.gather", "_inspect.summary", "_wrap.hooks", "testing")
    assert set(report["added"]).isdisjoint(f"devicekit.{name}" for name in waits)


def test_time_that_importing_adds_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"""
import sys, time
import torch
sys.dont_write_bytecode, sys.pycache_prefix = False, {str(tmp_path / "compiled")!r}
start = time.perf_counter()
import devicekit
print(time.perf_counter() - start)
"""
    untraced = {"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
    runs = [run_python("-c", code, cwd=tmp_path, **untraced) for _ in range(3)]

    # The first run compiles to bytecode, as installing does. No assertion: the machine may be busy.
    added = min(float(run.stdout) for run in runs[1:])
    with capsys.disabled():
        print(f"\nimport devicekit adds {added * 1000:.1f} ms to import torch")  # noqa: T201


def test_every_public_name_is_there_after_import_of_the_package_alone(tmp_path: Path) -> None:
    code = "import devicekit; [getattr(devicekit, name) for name in devicekit.__all__]"

    done = run_python("-c", code, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
