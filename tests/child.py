"""Run Python in a process of its own, with the devicekit that is tested here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import devicekit

__all__ = ["run_python"]

# What would change what a program does here: the launcher's and the reader's own choices.
_CHOICES = ("DEVICEKIT_DEVICE", "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def run_python(
    *arguments: str | Path, cwd: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` with every warning an error, and return what it printed.

    Args:
        arguments: What stands behind `python` on the command line.
        cwd: The folder to run in; Python looks for modules there first, so not the checkout.
        environ: Environment variables to set.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _CHOICES}
    path = [str(Path(devicekit.__file__).parents[1]), inherited.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        cwd=cwd,
        env=inherited | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
