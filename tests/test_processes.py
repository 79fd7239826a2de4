"""Several processes on one machine: under torchrun, and with the variables of other launchers."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from child import run_python
from fake_accelerator.build import build, unsupported

pytestmark = pytest.mark.machine("cpu")

EXAMPLE = Path(__file__).parents[1] / "examples" / "07_several_processes.py"
RANK = Path(__file__).with_name("rank.py")
CPU_ONLY = {"DEVICEKIT_DEVICE": "cpu"}


def torchrun(
    processes: int, *program: str | Path, cwd: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    return run_python(*launcher, *program, cwd=cwd, OMP_NUM_THREADS="1", **environ)


@pytest.fixture
def two_gpus() -> dict[str, str]:
    """The variables under which a child process has two fake GPUs."""
    if reason := unsupported("cuda"):
        pytest.skip(reason)
    build("cuda")  # once, and not by every process at the same time
    path = os.pathsep.join([str(RANK.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"DEVICEKIT_TEST_MACHINE": "cuda", "PYTHONPATH": path}


def seen(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
    return found


def test_ddp_trains_in_two_processes_and_each_loads_the_checkpoint(tmp_path: Path) -> None:
    done = torchrun(2, EXAMPLE, cwd=tmp_path, **CPU_ONLY)

    assert done.returncode == 0, done.stderr
    for rank in (0, 1):  # their lines may run into each other
        assert f"process {rank} of 2 trains on cpu" in done.stdout
        assert f"process {rank} loaded it on cpu: True" in done.stdout
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2


def test_the_same_program_runs_alone(tmp_path: Path) -> None:
    done = run_python(EXAMPLE, cwd=tmp_path, **CPU_ONLY)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("process 0 of 1 trains on cpu\n")
    assert done.stdout.endswith("process 0 loaded it on cpu: True\n")


def test_each_rank_has_its_own_gpu_for_model_batch_and_checkpoint(
    two_gpus: dict[str, str], tmp_path: Path
) -> None:
    done = torchrun(2, RANK, tmp_path, cwd=tmp_path, **two_gpus)

    assert done.returncode == 0, done.stderr
    first, second = seen(tmp_path, 0), seen(tmp_path, 1)
    for rank, found in enumerate((first, second)):
        places = {found[name] for name in ("auto", "model", "batch", "loaded")}
        assert places == {f"cuda:{rank}"}
        assert found["equal"]
    assert first["weights"] == second["weights"]  # trained in step, from different batches


def test_more_ranks_than_gpus_are_an_error_with_both_numbers(
    two_gpus: dict[str, str], tmp_path: Path
) -> None:
    done = torchrun(3, RANK, tmp_path, cwd=tmp_path, **two_gpus)

    assert done.returncode != 0
    assert "LOCAL_RANK is 2, but this process sees 2 cuda devices" in done.stderr
    assert "Start at most 2 processes on this machine." in done.stderr


@pytest.mark.parametrize("variable", ["SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_other_launchers_say_the_rank_in_their_own_variables(
    variable: str, two_gpus: dict[str, str], tmp_path: Path
) -> None:
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}

    def process(rank: int) -> subprocess.CompletedProcess[str]:
        own = {"RANK": str(rank), variable: str(rank)}
        return run_python(RANK, tmp_path, cwd=tmp_path, **two_gpus, **meeting, **own)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(process, range(2)):
            assert done.returncode == 0, done.stderr

    assert [seen(tmp_path, rank)["batch"] for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert [seen(tmp_path, rank)["loaded"] for rank in (0, 1)] == ["cuda:0", "cuda:1"]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])
