"""What no fake can show: contexts, forks, and memory that really is not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from child import run_python
from torch import nn

import devicekit

pytestmark = pytest.mark.machine("real")

# The driver of NVIDIA opens this file when CUDA starts in a process, and not for its management
# library.
CUDA_RUNS = """
import os
from pathlib import Path

def cuda_runs():
    files = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if os.path.islink(f)]
    return any(file.startswith("/dev/nvidia-uvm") for file in files)
"""


@pytest.fixture
def nvidia(dev: torch.device) -> torch.device:
    """A GPU about which NVIDIA's management library can be asked."""
    if dev.type != "cuda" or torch.version.hip:
        pytest.skip("about NVIDIA's driver")
    if shutil.which("nvidia-smi") is None:
        pytest.skip("without nvidia-smi, torch's runtime has to be asked")
    return dev


def printed(code: str, cwd: Path) -> Any:
    """Return what a program prints as JSON."""
    done = run_python("-c", code, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "question", ["auto()", "devices()", "diagnose()", "device('cuda:0')", "device('auto')"]
)
def test_asking_does_not_start_cuda(question: str, nvidia: torch.device, tmp_path: Path) -> None:
    code = f"{CUDA_RUNS}\nimport devicekit\ndevicekit.{question}\nprint(int(cuda_runs()))"

    assert printed(code, tmp_path) == 0


def test_the_check_for_contexts_sees_one(nvidia: torch.device, tmp_path: Path) -> None:
    code = f"{CUDA_RUNS}\nimport torch\ntorch.ones(1, device='cuda')\nprint(int(cuda_runs()))"

    assert printed(code, tmp_path) == 1


@pytest.mark.parametrize("before", ["", "devicekit.diagnose(); devicekit.devices()"])
def test_work_makes_a_context_on_the_chosen_device_only(
    before: str, nvidia: torch.device, tmp_path: Path
) -> None:
    code = f"""
import devicekit, json, torch
{before}
chosen = devicekit.auto()
devicekit.move(torch.ones(1), chosen)
has = [torch._C._cuda_hasPrimaryContext(i) for i in range(torch.cuda.device_count())]
print(json.dumps([chosen.index, [i for i, context in enumerate(has) if context]]))
"""

    chosen, contexts = printed(code, tmp_path)
    assert contexts == [chosen]


def test_a_fork_after_auto_can_use_the_device(nvidia: torch.device, tmp_path: Path) -> None:
    code = """
import devicekit, os, torch
device = devicekit.auto()
devicekit.devices(), devicekit.diagnose(), devicekit.device("cuda:0")
child = os.fork()
if child == 0:
    total = torch.ones(3, device=device).sum().item()
    os._exit(0 if total == 3 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

    assert printed(code, tmp_path) == 0


def test_what_does_not_fit_is_put_back(dev: torch.device) -> None:
    if dev.type != "cuda":
        pytest.skip("only CUDA lets a process limit its own memory")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(dev)
    total = torch.cuda.get_device_properties(dev).total_memory
    part = 256 << 20
    model = nn.ParameterList([torch.full((part // 4,), float(i)) for i in range(4)])
    parameters = list(model)
    # Room for two and a half of the four. Nothing tells of the limit beforehand.
    limit = torch.cuda.memory_reserved(dev) + part * 5 // 2
    torch.cuda.set_per_process_memory_fraction(limit / total, dev)
    try:
        with pytest.raises(devicekit.MoveError, match="out of memory") as caught:
            devicekit.move(model, dev)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, dev)

    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert [a is b for a, b in zip(model, parameters, strict=True)] == [True] * 4
    assert [p.device.type for p in model] == ["cpu"] * 4
    assert [p[:: len(p) - 1].tolist() for p in model] == [[float(i)] * 2 for i in range(4)]
    del caught
    assert torch.cuda.memory_allocated(dev) == before


def test_moving_takes_no_more_memory_than_the_model(dev: torch.device) -> None:
    if dev.type != "cuda":
        pytest.skip("only CUDA counts the peak")
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
    size = sum(p.nbytes for p in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(dev)
    before = torch.cuda.memory_allocated(dev)

    devicekit.move(model, dev)

    assert torch.cuda.max_memory_allocated(dev) - before <= size * 1.05
