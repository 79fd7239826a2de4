"""auto() gives each process the device on which accelerate and Lightning Fabric put it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from child import run_python
from fake_accelerator.build import build, unsupported

PLACED = Path(__file__).with_name("placed.py")
MODULES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}


@pytest.mark.parametrize("library", MODULES)
@pytest.mark.parametrize("machine", ["cpu", "cuda"])
def test_each_rank_is_put_where_the_library_puts_it(
    library: str, machine: str, tmp_path: Path
) -> None:
    pytest.importorskip(MODULES[library])
    if machine == "cuda":
        if reason := unsupported("cuda"):
            pytest.skip(reason)
        build("cuda")

    done = torchrun(PLACED, library, cwd=tmp_path, DEVICEKIT_TEST_MACHINE=machine)

    assert done.returncode == 0, done.stderr
    for rank, here in enumerate(["cpu", "cpu"] if machine == "cpu" else ["cuda:0", "cuda:1"]):
        assert f"rank {rank}: {here} {here}\n" in done.stdout


def torchrun(*program: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    path = [str(PLACED.parents[1]), os.environ.get("PYTHONPATH", "")]
    return run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program),
        cwd=cwd,
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(filter(None, path)),
        **environ,
    )
