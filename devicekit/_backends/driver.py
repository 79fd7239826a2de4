"""What NVIDIA's management library says about the GPUs, without starting CUDA.

Two ways to ask it: the module `pynvml` (the optional extra `devicekit[nvml]`), else the program
`nvidia-smi`. Neither makes a context on a GPU nor spoils a later `fork`.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

__all__ = ["Driver", "Gpu", "read_driver"]

ComputeMode = Literal["default", "exclusive", "prohibited"]

# Seconds. Without persistence mode nvidia-smi wakes every GPU first, a second or more for each.
_TIMEOUT = 20.0


class Gpu(NamedTuple):
    """One NVIDIA GPU of this machine, visible to this process or not. Memory is in bytes."""

    uuid: str
    name: str
    bus_id: str = ""
    total_memory: int | None = None
    free_memory: int | None = None
    capability: tuple[int, int] | None = None
    compute_mode: ComputeMode = "default"
    taken: bool = False
    """Another process computes on it."""
    mig: bool = False
    """It is cut into slices, of which CUDA shows a process one; memory and UUID are the whole's."""

    @property
    def busy(self) -> bool:
        """Whether its compute mode keeps this process out."""
        return self.compute_mode == "prohibited" or (
            self.compute_mode == "exclusive" and self.taken
        )


class Driver(NamedTuple):
    """NVIDIA's driver: its version, the newest CUDA it supports, and every GPU it knows."""

    version: str | None
    cuda: tuple[int, int] | None
    gpus: tuple[Gpu, ...]


def read_driver() -> Driver | None:
    """Return what the management library says, or None where it does not answer."""
    return _from_pynvml() or _from_nvidia_smi()


# ---- pynvml --------------------------------------------------------------------------------------


def _from_pynvml() -> Driver | None:
    try:
        with warnings.catch_warnings():  # the package `pynvml` warns that it has another name now
            warnings.simplefilter("ignore")
            nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not there, no driver, or a module of that name that is something else
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion")
        return Driver(
            version=_text(_ask(nvml, "nvmlSystemGetDriverVersion")) or None,
            cuda=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
            gpus=tuple(_gpu_from_pynvml(nvml, handle) for handle in handles),
        )
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _gpu_from_pynvml(nvml: Any, handle: Any) -> Gpu:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    pci = _ask(nvml, "nvmlDeviceGetPciInfo", handle)
    mode = _ask(nvml, "nvmlDeviceGetComputeMode", handle)
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) if mode else None
    mig = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(_ask(nvml, "nvmlDeviceGetName", handle)),
        bus_id=_text(pci.busId) if pci else "",
        total_memory=memory and int(memory.total),
        free_memory=memory and int(memory.free),
        capability=capability and (int(capability[0]), int(capability[1])),
        compute_mode=_compute_mode({0: "Default", 2: "Prohibited"}.get(mode or 0, "Exclusive")),
        taken=any(process.pid != os.getpid() for process in processes or ()),
        mig=bool(mig and mig[0]),
    )


def _ask(nvml: Any, function: str, *args: Any) -> Any:
    """Call one function of NVML; None where the driver, the GPU or the module does not have it."""
    try:
        return getattr(nvml, function)(*args)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: Any) -> str:
    """Old versions of the module return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


# ---- nvidia-smi ----------------------------------------------------------------------------------

_FIELDS = ("uuid", "name", "pci.bus_id", "memory.total", "memory.free")
_NEWER_FIELDS = (
    "compute_mode",
    "compute_cap",
    "mig.mode.current",
)  # unknown to drivers before R470


def _from_nvidia_smi() -> Driver | None:
    program = shutil.which("nvidia-smi")
    try:
        return None if program is None else _from_program(program)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _from_program(program: str) -> Driver | None:
    fields: tuple[str, ...] = _FIELDS + _NEWER_FIELDS
    rows = _query(program, "gpu", fields)
    if rows is None:
        fields = _FIELDS
        rows = _query(program, "gpu", fields)
    if rows is None:
        return None
    facts: list[dict[str, str]] = [dict(zip(fields, row, strict=False)) for row in rows]
    taken: set[str] = set()
    if any(_compute_mode(f.get("compute_mode", "")) == "exclusive" for f in facts):
        processes = _query(program, "compute-apps", ("gpu_uuid", "pid")) or []
        taken = {row[0] for row in processes if row[-1] != str(os.getpid())}
    header = _run(program) or ""
    return Driver(
        version=_first(r"(?:Driver|KMD) Version:\s*([0-9.]+)", header),
        cuda=_version(_first(r"CUDA (?:UMD )?Version:\s*([0-9.]+)", header)),
        gpus=tuple(_gpu_from_row(f, taken) for f in facts),
    )


def _gpu_from_row(facts: Mapping[str, str], taken: set[str]) -> Gpu:
    return Gpu(
        uuid=facts["uuid"],
        name=facts.get("name", ""),
        bus_id=facts.get("pci.bus_id", ""),
        total_memory=_mebibytes(facts.get("memory.total")),
        free_memory=_mebibytes(facts.get("memory.free")),
        capability=_version(facts.get("compute_cap")),
        compute_mode=_compute_mode(facts.get("compute_mode", "")),
        taken=facts["uuid"] in taken,
        mig=facts.get("mig.mode.current") == "Enabled",
    )


def _query(program: str, what: str, fields: tuple[str, ...]) -> list[list[str]] | None:
    output = _run(program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")
    if output is None:
        return None
    return [
        [cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()
    ]


def _run(program: str, *args: str) -> str | None:
    """Return what the program prints, or None where it fails.

    Raises:
        OSError: It cannot be run.
        subprocess.TimeoutExpired: It does not answer. Asking it something else will not help.
    """
    done = subprocess.run(
        [program, *args],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def _mebibytes(cell: str | None) -> int | None:
    """Integrated GPUs answer `[N/A]`."""
    return int(cell) << 20 if cell and cell.isdigit() else None


def _version(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"([0-9]+)\.([0-9]+)", text or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match.group(1) if match else None


def _compute_mode(text: str) -> ComputeMode:
    if text.startswith("Exclusive"):
        return "exclusive"
    return "prohibited" if text.startswith("Prohibited") else "default"
