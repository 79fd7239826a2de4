"""What a machine is to devicekit: the questions that it asks about hardware."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from devicekit._backends import cuda, generic, host, names
from devicekit._backends.accelerator import Accelerator
from devicekit._backends.info import DeviceInfo
from devicekit._backends.isolation import (
    Answers,
    Question,
    ask_directly,
    ask_in_child,
    can_use_child,
)
from devicekit._backends.survey import Build, Survey, read_build, read_survey

__all__ = ["THIS_MACHINE", "Machine"]


class Machine:
    """This machine, as torch, the driver and the environment describe it when they are asked.

    Nothing is read before it is asked for, and nothing read is kept.

    Attributes:
        environ: The environment variables that devicekit goes by; only ever read.
        decisions: What `auto()` has decided here, so that it answers the same for the whole
            process.
    """

    def __init__(self) -> None:
        self.environ: Mapping[str, str] = os.environ
        self.decisions: dict[object, Any] = {}

    def accelerator_types(self) -> tuple[str, ...]:
        """Return the accelerator types that this build of torch can use, torch's own choice first.

        Does not initialise any device.
        """
        current = torch.accelerator.current_accelerator()
        found = dict.fromkeys([current.type] if current is not None else [])
        found |= dict.fromkeys(["cuda"] if cuda.is_built() else [])
        found |= dict.fromkeys(t for t in names.known_types() if generic.is_built(t))
        return tuple(found)

    def accelerator(self, device_type: str) -> Accelerator:
        """Return the accelerators of one type, usable or not.

        Starts no runtime where NVIDIA's management library answers. Where only torch's runtime can
        tell (no `pynvml` and no `nvidia-smi`, ROCm, XPU and other types, GPUs of different models
        whose numbering only CUDA knows), it is asked, which makes a later `fork` unable to use the
        device. It makes no context on any device.
        """
        if device_type == "cuda":
            return cuda.read(self.environ)
        return generic.read(device_type, self.environ)

    def count(self, device_type: str) -> int:
        """Return how many devices of a type torch counts now; they need not all be usable."""
        if device_type == "cuda":
            return cuda.count()[0]
        return generic.count(device_type)[0]

    def cpu(self) -> DeviceInfo:
        """Return what there is to know about the CPU."""
        return host.read()

    def build(self) -> Build:
        """Return what this build of torch was made for; starts nothing."""
        return read_build()

    def survey(self) -> Survey:
        """Return what the system shows of hardware and drivers; starts nothing."""
        return read_survey(self.environ)

    def starts(self, device_type: str) -> tuple[bool, str]:
        """Start the runtime of a type and return whether it does, and why not.

        A later `fork` cannot use the device: to be asked in a child process (`ask`).
        """
        return cuda.starts() if device_type == "cuda" else (True, "")

    def ask(self, questions: Sequence[Question]) -> Answers:
        """Ask where it does no harm: in a child process with a limit of time, where one can."""
        answers = ask_in_child(questions) if can_use_child() else None
        return ask_directly(questions) if answers is None else answers

    def settled_count(self, device_type: str) -> int:
        """Return how many devices of a type there are, once that cannot change any more.

        Zero before its runtime is started: until then the visibility variables may still change.
        """
        module = getattr(torch, device_type, None)
        is_initialized = getattr(module, "is_initialized", None)
        if module is None:
            return 0
        try:
            if is_initialized is not None and not is_initialized():
                return 0
            return int(module.device_count())
        except Exception:  # a plugin may raise anything
            return 0

    def settled(self, device: torch.device) -> Callable[[], bool] | None:
        """Return what tells, fast, that a device is still there; None while that may change."""
        if not self.settled_count(device.type):
            return None
        if device.type in ("cuda", "xpu"):  # torch's own, which count once
            is_initialized: Callable[[], bool] = getattr(torch, device.type).is_initialized
            return is_initialized
        return lambda: self.settled_count(device.type) > device.index

    def current_index(self, device_type: str) -> int:
        """Return the index that a device without one means in this thread; starts nothing."""
        current = getattr(getattr(torch, device_type, None), "current_device", None)
        if current is None or not self.settled_count(device_type):
            return 0
        try:
            return int(current())
        except Exception:  # a plugin may raise anything
            return 0

    def free_memory(self, device: torch.device) -> int | None:
        """Return the bytes that could be allocated on a device, or None where that is not known.

        Asks the runtime, which makes a context on the device: only for one about to be used.
        """
        if device.type == "cuda":
            return cuda.free_memory(device)
        return generic.free_memory(device)


THIS_MACHINE = Machine()
"""The real one."""
