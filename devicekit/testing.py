"""Pretend to have other hardware, to test a program's device handling on any machine.

Selection, validation and diagnosis believe in the hardware; tensors cannot be made on it. Needs no
pytest.
"""

from __future__ import annotations

import operator
import os
import re
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from devicekit._backends import (
    DeviceInfo,
    needs_plugin,
    pretend,
)
from devicekit._backends.accelerator import Accelerator
from devicekit._backends.cuda import describe_gpu
from devicekit._backends.driver import Driver, Gpu
from devicekit._backends.isolation import Answers, Question, ask_directly
from devicekit._backends.machine import Machine
from devicekit._backends.memory import parse_size
from devicekit._backends.names import label
from devicekit._backends.survey import Build, Survey
from devicekit._backends.visibility import variables_set, visible
from devicekit._types import Reason

__all__ = ["fake_devices"]

_ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@contextmanager
def fake_devices(
    *,
    cuda: int | None = None,
    rocm: int | None = None,
    xpu: int | None = None,
    mps: int | None = None,
    mtia: int | None = None,
    hpu: int | None = None,
    names: str | Sequence[str] = "Fake GPU",
    total_memory: int | str | Sequence[int | str] = "80GiB",
    free_memory: int | str | Sequence[int | str] = "79GiB",
    capability: tuple[int, int] | Sequence[tuple[int, int]] = (9, 0),
    build: str | None = "13.0",
    driver: str | None = "13.0",
    architectures: Sequence[str] = _ARCHITECTURES,
    environ: Mapping[str, str] | None = None,
) -> Generator[None]:
    """Make devicekit believe in other hardware, in this thread or task, inside the block.

    `auto()`, `device()` and `devices()` answer as they would on such a machine. The visibility
    variables hide fake devices as they do real ones. Also a decorator.

    Args:
        cuda: How many NVIDIA GPUs the machine has; 0 for a CUDA build on a machine without one,
            None for a build without CUDA.
        rocm: The same for AMD GPUs, which are `cuda` devices to torch.
        xpu: The same for Intel GPUs.
        mps: 1 on an Apple machine, 0 where torch has MPS and the machine has no such GPU.
        mtia: The same for MTIA devices.
        hpu: The same for Gaudi devices.
        names: The name of every device, or one for each.
        total_memory: The memory of every device, in bytes or as a text such as `"8GiB"`, or one
            for each.
        free_memory: What of it is free, likewise.
        capability: The compute capability of every NVIDIA GPU, or one for each.
        build: The CUDA version of the build of torch, or None for a CPU-only build.
        driver: The newest CUDA version that the driver supports, or None for a machine without a
            driver.
        architectures: What the build has kernels for, as in `torch.cuda.get_arch_list()`.
        environ: Environment variables to believe in, over the real ones; nothing is written to
            `os.environ`.

    Raises:
        TypeError: An argument is of another kind than described.
        ValueError: A sequence does not have one value for each device, a memory is no amount of
            memory, a version is none, a number of devices is not possible, or there are GPUs of
            both NVIDIA and AMD.

    Examples:
        >>> import devicekit
        >>> with fake_devices(cuda=2, names=["small", "large"], free_memory=["4GiB", "60GiB"]):
        ...     devicekit.auto(), [info.name for info in devicekit.devices()][:2]
        (device(type='cuda', index=1), ['small', 'large'])
        >>> with fake_devices(cuda=1, capability=(6, 1)):  # too old for this build of torch
        ...     devicekit.auto()
        device(type='cpu')
    """
    if cuda is not None and rocm is not None:
        msg = "cuda and rocm are both given: a build of torch has one of them."
        raise ValueError(msg)
    counts = _counted(
        {"cuda" if rocm is None else "rocm": cuda if rocm is None else rocm}
        | {"xpu": xpu, "mps": mps, "mtia": mtia, "hpu": hpu}
    )
    number = sum(counts.values())
    facts = zip(
        _each("names", names, number, _is_text, "a text"),
        _each("total_memory", total_memory, number, _is_size, _SIZE),
        _each("free_memory", free_memory, number, _is_size, _SIZE),
        _each("capability", capability, number, _is_pair, "a pair such as (9, 0)"),
        strict=True,
    )
    gpus = [
        Gpu(
            uuid=f"GPU-{i:08x}-0000-0000-0000-000000000000",
            name=name,
            bus_id=f"00000000:{i:02X}:00.0",
            total_memory=parse_size(total),
            free_memory=parse_size(free),
            capability=capable,
        )
        for i, (name, total, free, capable) in enumerate(facts)
    ]
    machine = _FakeMachine(
        gpus={t: [gpus.pop(0) for _ in range(n)] for t, n in counts.items()},
        rocm=rocm is not None,
        build=_version("build", build),
        driver=_version("driver", driver),
        architectures=_architecture_names(architectures),
        environ=_variables({} if environ is None else environ),
    )
    with pretend(machine):
        yield


# ---- arguments -----------------------------------------------------------------------------------

_SIZE = "a number of bytes or a text such as '8GiB'"


def _counted(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return how many devices there are of each type that the build has."""
    counted: dict[str, int] = {}
    for argument, given in counts.items():
        if given is None:
            continue
        number: Any = None if isinstance(given, bool) else given  # a truth counts as 1 otherwise
        try:
            count = operator.index(number)
        except TypeError:
            msg = f"{argument} is {given!r}: expected how many devices there are, or None."
            raise TypeError(msg) from None
        device_type = "cuda" if argument == "rocm" else argument
        most = 1 if device_type == "mps" else 128  # torch keeps an index in a signed byte
        if not 0 <= count <= most:
            msg = f"{count} devices of type {device_type}: expected a number from 0 to {most}."
            raise ValueError(msg)
        counted[device_type] = count
    return counted


def _each(
    argument: str, given: Any, number: int, is_one: Callable[[object], bool], expected: str
) -> list[Any]:
    """Return one value for each device, of one for all or of as many as there are devices."""
    if is_one(given):
        return [given] * number
    values = list(given) if isinstance(given, Iterable) and not _is_text(given) else [None]
    if not all(map(is_one, values)):
        msg = f"{argument} is {given!r}: expected {expected}, or one for each device."
        raise TypeError(msg)
    if len(values) != number:
        msg = (
            f"{argument} has {len(values)} values for {number} devices: "
            f"expected one value, or one for each device."
        )
        raise ValueError(msg)
    return values


def _is_text(given: object) -> bool:
    return isinstance(given, str)


def _is_size(given: object) -> bool:
    return isinstance(given, (str, int))


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple) and [type(part) for part in given] == [int, int]


def _version(argument: str, given: Any) -> str | None:
    if given is None:
        return None
    is_text = isinstance(given, str)
    if not is_text or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})*(-\w+)?", given):
        msg = f"{argument} is {given!r}: expected a version such as '13.0', or None."
        raise ValueError(msg) if is_text else TypeError(msg)
    return str(given)


def _architecture_names(given: Any) -> tuple[str, ...]:
    names: Any = given.split() if isinstance(given, str) else given
    if not isinstance(names, Iterable) or not all(map(_is_text, names)):
        msg = f"architectures is {given!r}: expected texts such as ('sm_80', 'sm_90')."
        raise TypeError(msg)
    return tuple(names)


def _variables(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping) or not all(
        _is_text(name) and _is_size(value) for name, value in given.items()
    ):
        msg = (
            f"environ is {given!r}: expected a mapping of names to texts, such as "
            f"{{'LOCAL_RANK': '1'}}."
        )
        raise TypeError(msg)
    return {name: str(value) for name, value in given.items()}


# ---- the machine ---------------------------------------------------------------------------------


class _FakeMachine(Machine):
    """A machine made up of the same facts that the driver tells of a real one."""

    def __init__(
        self,
        gpus: Mapping[str, Sequence[Gpu]],
        *,
        rocm: bool,
        build: str | None,
        driver: str | None,
        architectures: tuple[str, ...],
        environ: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.environ = ChainMap(dict(environ), cast("dict[str, str]", os.environ))
        self._gpus = gpus
        self._rocm = rocm
        self._build = build
        self._driver = driver
        self._architectures = () if rocm else architectures

    def accelerator_types(self) -> tuple[str, ...]:
        return tuple(t for t in self._gpus if t != "cuda" or self._build is not None)

    def accelerator(self, device_type: str) -> Accelerator:
        cuda = device_type == "cuda"
        platform = "rocm" if cuda and self._rocm else device_type
        title = "ROCm" if platform == "rocm" else label(platform)
        present = self._gpus.get(device_type, ())
        left = visible(platform, self.environ, [gpu.uuid for gpu in present])
        seen = [present[i] for i in left]
        reason = self._why_none(device_type, present, seen)
        return Accelerator(
            type=device_type,
            label=title,
            devices=()
            if reason
            else tuple(self._device(device_type, i, g) for i, g in enumerate(seen)),
            reason=reason,
            hidden=len(present) - len(seen),
            visibility=variables_set(platform, self.environ),
            architectures=self._architectures if cuda else (),
            runtime=f"{title} {self._build}" if cuda else "",
        )

    def count(self, device_type: str) -> int:
        return len(self.accelerator(device_type).devices)

    def free_memory(self, device: torch.device) -> int | None:
        devices = self.accelerator(device.type).devices
        return next((info.free_memory for info in devices if info.device == device), None)

    def settled_count(self, device_type: str) -> int:
        return 0

    def build(self) -> Build:
        types = self.accelerator_types()
        local = "cpu" if "cuda" not in types else "rocm" if self._rocm else f"cu{self._build}"
        return Build(
            torch=f"{torch.__version__.partition('+')[0]}+{local.replace('.', '')}",
            cuda=self._build if local.startswith("cu") else None,
            rocm=self._build if local == "rocm" else None,
            xpu=self._build if "xpu" in types else None,
            mps="mps" in types,
        )

    def survey(self) -> Survey:
        nvidia = () if self._rocm else tuple(self._gpus.get("cuda", ()))
        found = {
            "nvidia": len(nvidia),
            "amd": len(self._gpus.get("cuda", ())) if self._rocm else 0,
            "intel": len(self._gpus.get("xpu", ())),
        }
        known = None
        if nvidia and self._driver is not None:
            major, minor = (*map(int, re.findall("[0-9]+", self._driver)), 0)[:2]
            known = Driver(version=None, cuda=(major, minor), gpus=nvidia)
        return Survey(pci=tuple((v, n) for v, n in sorted(found.items()) if n), driver=known)

    def starts(self, device_type: str) -> tuple[bool, str]:
        return True, ""

    def ask(self, questions: Sequence[Question]) -> Answers:
        return ask_directly(questions)

    def _why_none(
        self, device_type: str, present: Sequence[Gpu], seen: Sequence[Gpu]
    ) -> Reason | None:
        if device_type not in self.accelerator_types():
            return "plugin not installed" if needs_plugin(device_type) else "build without it"
        if device_type == "cuda" and not self._rocm:
            if self._driver is None:
                return "no driver"
            major, built = (int(re.split(r"\D", str(v))[0]) for v in (self._driver, self._build))
            if present and major < built:
                return "driver too old"
        if present and not seen:
            return "hidden by a visibility variable"
        if not present:
            return "no driver" if device_type == "cuda" and not self._rocm else "none visible"
        return None

    def _device(self, device_type: str, index: int, gpu: Gpu) -> DeviceInfo:
        if device_type == "cuda":
            return describe_gpu(index, gpu, self._architectures)
        return DeviceInfo(
            device=torch.device(device_type, index),
            name=gpu.name,
            total_memory=gpu.total_memory,
            free_memory=gpu.free_memory,
        )
