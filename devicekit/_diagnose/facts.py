"""Gather what there is to know about this machine, and lose no time or process over it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from devicekit._backends import VARIABLES, Accelerator, DeviceInfo, Machine, current_machine
from devicekit._backends.isolation import Question
from devicekit._backends.survey import Build, Survey
from devicekit._device import decide
from devicekit.errors import DeviceError

__all__ = ["Facts", "gather", "redacted"]

# Other variables that decide what a program sees, and where launchers say what they started.
_OTHER_VARIABLES = (
    "DEVICEKIT_DEVICE",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION",
    "ZE_FLAT_DEVICE_HIERARCHY",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "SLURM_LOCALID",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_RANK",
)


class Facts(NamedTuple):
    """Everything that a diagnosis goes by.

    Attributes:
        version: The version of devicekit.
        build: This build of torch.
        survey: What the system shows of hardware and drivers.
        environment: The variables that matter and are set, with their values as they are.
        accelerators: What torch can use of each type, in torch's order.
        cpu: The CPU.
        counted: How many CUDA devices torch counts, whether or not CUDA starts.
        refused_to_start: What CUDA said when it did not start; None where it did, or was not asked.
        choice: The device that `auto()` takes, or None where it refuses.
        choice_reason: Why, or what it refuses.
        passed_over: What `auto()` passes over, with the reason.
        failed: The questions that ended in an error, with the error.
        blocked: The question that was not answered in time, or None.
        crashed: The question at which the process that asked it ended, or None.
    """

    version: str
    build: Build
    survey: Survey
    environment: tuple[tuple[str, str], ...]
    accelerators: tuple[Accelerator, ...]
    cpu: DeviceInfo
    counted: int = 0
    refused_to_start: str | None = None
    choice: torch.device | None = None
    choice_reason: str = ""
    passed_over: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    blocked: str | None = None
    crashed: str | None = None

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables that matter and are set."""
        return dict(self.environment)

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """Every device, the CPU last."""
        return (*(info for found in self.accelerators for info in found.devices), self.cpu)

    def accelerator(self, device_type: str) -> Accelerator | None:
        """Return what torch can use of a type; None where this build does not know the type."""
        return next((found for found in self.accelerators if found.type == device_type), None)


def gather() -> Facts:
    """Return what there is to know here; see `Machine.ask` for how it is asked."""
    machine = current_machine()
    build = machine.build()
    types, failed = _types(machine)
    answers = machine.ask(_questions(machine, types))
    survey: Survey = answers.values.get("the system", Survey())
    accelerators = [answers.values[t] for t in types if t in answers.values]
    started: tuple[bool, str] = answers.values.get("the start of CUDA", (True, ""))
    device, reason, passed = answers.values.get("auto()", (None, "it could not be asked", ()))
    return Facts(
        version=str(getattr(sys.modules.get("devicekit"), "__version__", "unknown")),
        build=build,
        survey=survey,
        environment=_environment(machine.environ),
        accelerators=tuple(a if started[0] else _unusable(a) for a in accelerators),
        cpu=machine.cpu(),
        counted=answers.values.get("the number of CUDA devices", 0),
        refused_to_start=None if started[0] else started[1],
        choice=device,
        choice_reason=reason,
        passed_over=passed,
        failed=(*failed, *answers.failed.items()),
        blocked="nvidia-smi" if survey.silent else answers.blocked,
        crashed=answers.crashed,
    )


def _types(machine: Machine) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    try:
        return machine.accelerator_types(), ()
    except Exception as error:  # a plugin may raise anything
        return (), (("the types of accelerators", f"{type(error).__name__}: {error}"),)


def _questions(machine: Machine, types: Sequence[str]) -> list[Question]:
    """Return the questions in the order in which they can hang, the safe ones first."""

    def accelerator(device_type: str, before: Mapping[str, Any]) -> Accelerator:
        if device_type == "cuda" and before.get("the system", Survey()).silent:
            return Accelerator(type="cuda", label="CUDA", reason="driver failed")
        return machine.accelerator(device_type)

    def count(before: Mapping[str, Any]) -> int:
        return 0 if before.get("the system", Survey()).silent else machine.count("cuda")

    def start(before: Mapping[str, Any]) -> tuple[bool, str]:
        seen: Accelerator | None = before.get("cuda")
        return machine.starts("cuda") if seen and seen.devices else (True, "")

    def choice(before: Mapping[str, Any]) -> tuple[torch.device | None, str, tuple[str, ...]]:
        if before.get("the system", Survey()).silent:
            return None, "not asked, because the driver does not answer", ()
        try:
            decided = decide()
        except DeviceError as error:
            return None, str(error), ()
        return decided.device, decided.reason, decided.passed_over

    questions: list[Question] = [("the system", lambda before: machine.survey())]
    questions += [(name, partial(accelerator, name)) for name in types]
    questions += [("auto()", choice)]
    if "cuda" in types:
        questions += [("the number of CUDA devices", count), ("the start of CUDA", start)]
    return questions


def _unusable(accelerator: Accelerator) -> Accelerator:
    """Return the CUDA devices as they are where CUDA counts them and does not start."""
    if accelerator.type != "cuda":
        return accelerator
    devices = tuple(
        replace(info, usable=False, reason=info.reason or "driver failed")
        for info in accelerator.devices
    )
    return accelerator._replace(devices=devices)


def _environment(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    names = dict.fromkeys(name for names in VARIABLES.values() for name in names)
    return tuple((n, environ[n]) for n in (*names, *_OTHER_VARIABLES) if n in environ)


# ---- what may be told ----------------------------------------------------------------------------

_PREFIXED_UUID = re.compile(r"((?:GPU-|MIG-)+[0-9a-fA-F]{8})(?:-[0-9a-fA-F]+)+")
_BARE_UUID = re.compile(r"\b([0-9a-fA-F]{8})(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_HOME = re.compile(r"(?:/home/|/Users/|[A-Za-z]:\\Users\\)[^/\\\s'\":,;]+")


def redacted(text: str, *, longest: int = 200) -> str:
    r"""Return a text as it may stand in a bug report: short UUIDs, no home folder, one line.

    Examples:
        >>> redacted("GPU-01234567-89ab-cdef-0123-456789abcdef in /home/ann/x")
        'GPU-01234567... in ~/x'
    """
    for pattern in (_PREFIXED_UUID, _BARE_UUID):
        text = pattern.sub(r"\1...", text)
    text = _HOME.sub("~", text)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
