"""What `inspect` returns: which tensors are where, and everything odd about it.

How it is shown is imported when it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch

from devicekit.errors import DeviceMismatchError, NoDeviceError

__all__ = ["DeviceReport", "Located", "Part", "Place"]


class Located(NamedTuple):
    """A tensor of which something is to be said.

    Attributes:
        path: Where it stands.
        device: Where it is.
        shape: Its shape, or None where it has none yet or none that can be read.
        dtype: Its dtype, or None for packed weights.
        why: What is to be said.
    """

    path: str
    device: torch.device
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    why: str = ""

    def __str__(self) -> str:
        return f"{self.path} on {self.device}"


class Place(NamedTuple):
    """What is on one device.

    Attributes:
        device: The device.
        parameters: How many tensors there are parameters.
        buffers: How many are buffers.
        others: How many are anything else: data, state, strays.
        bytes: The memory they hold; what they share is counted once.
        examples: The names of the largest.
    """

    device: torch.device
    parameters: int
    buffers: int
    others: int
    bytes: int
    examples: tuple[str, ...]

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return self.parameters + self.buffers + self.others


class Part(NamedTuple):
    """A sub-module that is on one device as a whole, while the module around it is not.

    Attributes:
        path: Its name.
        device: Where it is.
        tensors: How many parameters and buffers it has.
        bytes: The memory they hold.
    """

    path: str
    device: torch.device
    tensors: int
    bytes: int


@dataclass(frozen=True, repr=False)
class DeviceReport:
    """Which tensors of an object are where, and everything odd about it: see `inspect`.

    `print` it for a table, let a notebook show it, or log `to_dict()`. It holds names and numbers,
    and keeps no tensor alive.

    Attributes:
        name: The type of the object.
        places: What is on each device, the one with the most bytes first.
        home: Where the rest belongs: the device of most bytes, or the execution device that
            accelerate's hooks declare.
        input_device: Where inputs belong, as `device_of` says; None where there is no tensor.
        parts: The sub-modules that are on one device as a whole, if the object is not.
        away: Parameters, buffers and data that are on another device than `home`, and that no hook
            put there.
        strays: Tensors in plain attributes, in lists, dicts and objects, and in sub-modules that
            are not registered: `Module.to` does not move them.
        aliases: Plain attributes that are a buffer as well: the next `Module.to` leaves them
            behind.
        stale: Those that it has left behind, as far as can be told: strays with the shape and dtype
            of one single buffer, which is on another device.
        left: State of an optimizer that is not where its parameter is, and parameters of an
            optimizer that are in none of the modules beside it.
        ties: Names that stand for one and the same parameter.
        torn: Parameters that the model declares to be tied and that are not, as (name, source).
        lazy: Parameters that get their shape in the first forward.
        meta: Parameters and buffers that have no values.
        offloaded: Those that accelerate brings back for each forward.
        quantized: Quantized parameters, and packed weights.
        sharded: Parameters that are sharded over several processes.
        replicas: The sub-modules that are replicas made by `DataParallel`; `""` is the object.
        mislabelled: Attributes that name a device on which nothing of the object is.
        baked: The devices that a traced or exported graph has written into it.

    Examples:
        >>> import devicekit, torch
        >>> report = devicekit.inspect(torch.nn.Linear(2, 1))
        >>> report.device, report.is_split, report.places[0].bytes
        (device(type='cpu'), False, 12)
    """

    name: str
    places: tuple[Place, ...] = ()
    home: torch.device | None = None
    input_device: torch.device | None = None
    parts: tuple[Part, ...] = ()
    away: tuple[Located, ...] = ()
    strays: tuple[Located, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    stale: tuple[tuple[str, str], ...] = ()
    left: tuple[Located, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    torn: tuple[tuple[str, str], ...] = ()
    lazy: tuple[str, ...] = ()
    meta: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    quantized: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    mislabelled: tuple[Located, ...] = ()
    baked: tuple[str, ...] = ()
    _split_over: tuple[torch.device, ...] = ()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that has something of it, the one with the most bytes first."""
        return tuple(place.device for place in self.places)

    @property
    def device(self) -> torch.device:
        """The one device that everything is on.

        Strays count; 0-dim tensors on the CPU do not, nor what accelerate has offloaded.

        Raises:
            DeviceMismatchError: There are several; the message names what is elsewhere.
            NoDeviceError: There is no tensor.
        """
        strays = [s.device for s in self.strays if s.shape or s.device.type != "cpu"]
        found = list(dict.fromkeys([*self._split_over, *strays])) or list(self.devices[:1])
        if not found:
            msg = f"{self.name} holds no tensor, so it has no device."
            raise NoDeviceError(msg)
        if len(found) > 1:
            paths = tuple(tensor.path for tensor in (*self.away, *self.strays))
            raise DeviceMismatchError(self.headline, devices=tuple(found), paths=paths)
        return found[0]

    @property
    def is_split(self) -> bool:
        """Whether its parameters, buffers or data are on several devices.

        Strays do not count, nor 0-dim tensors on the CPU, nor what accelerate has offloaded.
        """
        return len(self._split_over) > 1

    @property
    def bytes(self) -> int:
        """The memory that all of it holds."""
        return sum(place.bytes for place in self.places)

    @property
    def headline(self) -> str:
        """What matters most, in a sentence: the first line of `str(report)`."""
        from devicekit._inspect import text

        return text.headline(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in plain lists, dicts, texts and numbers, for a log.

        Examples:
            >>> import devicekit, json, torch
            >>> logged = json.dumps(devicekit.inspect(torch.ones(3)).to_dict())
            >>> json.loads(logged)["places"][0]["bytes"]
            12
        """
        known = (field.name for field in fields(self) if not field.name.startswith("_"))
        plain = {name: _plain(getattr(self, name)) for name in known}
        extra = {"headline": self.headline, "is_split": self.is_split, "bytes": self.bytes}
        return plain | extra | {"devices": _plain(self.devices)}

    def __str__(self) -> str:
        from devicekit._inspect import text

        return text.table(self)

    def __repr__(self) -> str:
        return f"<DeviceReport: {self.headline}>"

    def _repr_html_(self) -> str:
        from devicekit._inspect import html

        return html.page(self)


def _plain(value: object) -> Any:
    if isinstance(value, (torch.device, torch.dtype)):
        return str(value).removeprefix("torch.")
    if isinstance(value, (Located, Place, Part)):
        return {key: _plain(part) for key, part in value._asdict().items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in cast("tuple[object, ...]", value)]
    return value
