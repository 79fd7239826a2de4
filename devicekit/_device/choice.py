"""The automatic choice: which of the usable devices this process should work on."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from devicekit._backends import DeviceInfo, current_machine
from devicekit._backends.memory import format_size, parse_size
from devicekit._backends.visibility import VARIABLES
from devicekit._device.checking import check, forget_unsettled
from devicekit._device.spelling import parse_type, shown
from devicekit._types import Reason
from devicekit.errors import DeviceError, DeviceUnavailableError, InvalidDeviceError

if TYPE_CHECKING:
    from devicekit._backends.accelerator import Accelerator
    from devicekit._backends.machine import Machine

__all__ = ["LAUNCHER_VARIABLES", "Choice", "decide"]

_logger = logging.getLogger("devicekit")

LAUNCHER_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
"""Where torchrun, SLURM and Open MPI say which process of its machine this is."""


class Choice(NamedTuple):
    """What `auto()` decided.

    Attributes:
        device: The device.
        reason: Why this one, as half a sentence.
        passed_over: What stood before it and was not taken, with the reason.
    """

    device: torch.device
    reason: str
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        passed = f" (passed over: {'; '.join(self.passed_over)})" if self.passed_over else ""
        return f"{self.device}: {self.reason}{passed}"


def decide(
    *, prefer: str | Sequence[str] | None = None, min_free: int | str | None = None
) -> Choice:
    """Return what `auto()` decides, with the reason; decided and logged once."""
    machine = current_machine()
    chosen_types = None if prefer is None else _types_in(prefer)
    bytes_wanted = parse_size(min_free)
    key = (chosen_types, bytes_wanted, _circumstances(machine))
    kept = machine.decisions.get(key)
    if kept is None:
        forget_unsettled()
        choice = _decide(machine, chosen_types, bytes_wanted)
        kept = machine.decisions.setdefault(key, choice)  # two threads may both have decided
        if kept is choice:
            _logger.info("auto() chose %s", choice)
    return kept


def _decide(machine: Machine, types: tuple[str, ...] | None, min_free: int) -> Choice:
    requested = machine.environ.get("DEVICEKIT_DEVICE")
    if not requested or requested == "auto":  # in a shell, empty is how one unsets it for a command
        return _choose(machine, types, min_free)
    try:
        return Choice(check(requested), f"DEVICEKIT_DEVICE={requested}")
    except DeviceError as error:
        error.args = (
            f"The environment variable DEVICEKIT_DEVICE is set to {shown(requested)}. {error} "
            "Unset it to let auto() choose.",
        )
        raise


def _types_in(prefer: str | Sequence[str]) -> tuple[str, ...]:
    # What is no sequence is taken for one name, which parse_type() refuses.
    one = isinstance(prefer, str) or not hasattr(prefer, "__iter__")
    return tuple(map(parse_type, [prefer] if one else prefer))


def _circumstances(machine: Machine) -> tuple[object, ...]:
    """Return what may change an answer: the variables, and how many devices torch counts."""
    names = ("DEVICEKIT_DEVICE", *LAUNCHER_VARIABLES, "CUDA_DEVICE_ORDER", *_VISIBILITY_VARIABLES)
    counts = tuple((t, machine.count(t)) for t in machine.accelerator_types())
    return (*map(machine.environ.get, names), counts)


_VISIBILITY_VARIABLES = tuple(sorted({name for names in VARIABLES.values() for name in names}))


def _choose(machine: Machine, preferred: Sequence[str] | None, min_free: int) -> Choice:
    """Return the device of the first type that has a usable one, else the CPU.

    Args:
        machine: The machine to choose on.
        preferred: The types to try, in this order, or None for those of the machine.
        min_free: Bytes that must be free; a device with less is passed over.

    Raises:
        InvalidDeviceError: A launcher's variable does not hold a rank.
        DeviceUnavailableError: The launcher's rank has no device of its own.
    """
    passed: list[str] = []
    types = machine.accelerator_types() if preferred is None else preferred
    for device_type in types:
        if device_type == "cpu":
            return Choice(torch.device("cpu"), "preferred", tuple(passed))
        accelerator = machine.accelerator(device_type)
        refused = dict(_refused(accelerator, min_free))
        passed += [f"{name}, {why}" for name, why in refused.items()]
        usable = [info for info in accelerator.devices if str(info.device) not in refused]
        if not usable:
            continue
        rank = _local_rank(machine.environ)
        if rank is not None:
            return Choice(*_by_rank(*rank, accelerator, refused), tuple(passed))
        return Choice(*_most_free(usable, accelerator), tuple(passed))
    wanted = f" among those preferred ({', '.join(types)})" if preferred else ""
    wanted += f" with {format_size(min_free)} free" if min_free else ""
    return Choice(torch.device("cpu"), f"no usable accelerator{wanted}", tuple(passed))


def _refused(accelerator: Accelerator, min_free: int) -> Iterator[tuple[str, str]]:
    """Yield what cannot be taken, the type as a whole or single devices, with the reason."""
    if not accelerator.devices:
        yield accelerator.type, accelerator.reason or "none visible"
    for info in accelerator.devices:
        if not info.usable:
            yield str(info.device), info.reason or "driver failed"
        elif info.free_memory is not None and info.free_memory < min_free:
            free, wanted = format_size(info.free_memory), format_size(min_free)
            yield str(info.device), f"{free} free of the {wanted} wanted"


def _by_rank(
    variable: str, rank: int, accelerator: Accelerator, refused: Mapping[str, str]
) -> tuple[torch.device, str]:
    """Return the device of this rank: the only one where each process is shown its own.

    No other one will do: two ranks on one device, or one on the CPU, would slow down all of them.
    """
    seen = accelerator.devices
    index = 0 if len(seen) == 1 else rank
    wanted = f"{accelerator.type}:{index}"
    if index < len(seen) and wanted not in refused:
        alone = "the only visible device, " if len(seen) == 1 else ""
        return seen[index].device, f"{alone}{variable}={rank}"
    free = tuple(info.device for info in seen if str(info.device) not in refused)
    remedy = f"at most {len(free)} process{'es' if len(free) != 1 else ''} on this machine"
    reason: Reason | None = "index out of range"
    trouble = f"this process sees {len(seen)} {accelerator.type} devices, numbered from 0"
    if index < len(seen):
        reason, trouble = seen[index].reason, f"{wanted} cannot be used ({refused[wanted]})"
        hides = VARIABLES.get(accelerator.label.lower())
        remedy += f", and leave {wanted} out of {hides[0]}" if hides else ""
    elif accelerator.visibility:
        trouble += f" ({' and '.join(f'{n}={shown(v)}' for n, v in accelerator.visibility)})"
    msg = f"{variable} is {rank}, but {trouble}. Start {remedy}."
    raise DeviceUnavailableError(msg, requested=wanted, available=free, reason=reason)


def _most_free(usable: Sequence[DeviceInfo], accelerator: Accelerator) -> tuple[torch.device, str]:
    """Return the device this process is on already, else the one with the most free memory."""
    for info in usable:
        if info.device.index == accelerator.in_use:
            return info.device, "this process already uses it"
    if len(usable) == 1:
        return usable[0].device, f"the only usable {accelerator.label} device"
    known = [(info.free_memory, info) for info in usable if info.free_memory is not None]
    if not known:
        return usable[0].device, f"the current {accelerator.label} device; free memory is not known"
    free, best = max(known, key=lambda pair: pair[0])  # of equals the first: the lowest index
    what = f"the most free memory of {len(usable)} {accelerator.label} devices"
    return best.device, f"{what} ({format_size(free)})"


def _local_rank(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the launcher's variable and the rank it holds, or None without a launcher."""
    for variable in LAUNCHER_VARIABLES:
        value = environ.get(variable)
        if value is None:
            continue
        if not re.fullmatch(r"[0-9]{1,9}", value):
            msg = (
                f"The environment variable {variable} is {shown(value)}: expected the rank of this "
                f"process on its machine, a whole number from 0 on. "
                f"Unset it where no launcher is used."
            )
            raise InvalidDeviceError(msg)
        return variable, int(value)
    return None
