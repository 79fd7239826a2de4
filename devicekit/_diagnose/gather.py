"""Gather what there is to know about this machine, and lose no time or process over it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from devicekit._backends import current_machine
from devicekit._backends.accelerator import Accelerator
from devicekit._backends.isolation import Question
from devicekit._backends.machine import Machine
from devicekit._backends.survey import Survey
from devicekit._backends.visibility import VARIABLES
from devicekit._device.choice import decide
from devicekit._diagnose.facts import Facts
from devicekit.errors import DeviceError

__all__ = ["gather"]

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
