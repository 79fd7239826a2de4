"""Batches moved ahead of use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from devicekit._backends import pretended
from devicekit._device import device as checked_device
from devicekit._device.spelling import shown
from devicekit._inspect import device_of
from devicekit._move import move
from devicekit._move.transfer import STREAMED
from devicekit._tree import walk
from devicekit._types import DeviceLike
from devicekit.errors import InvalidDeviceError, MoveError

__all__ = ["Prefetcher", "prefetch"]

_T = TypeVar("_T")


def prefetch(
    loader: Iterable[_T], where: nn.Module | DeviceLike, /, *, depth: int = 2
) -> Prefetcher[_T]:
    """Return an iterable over the batches of a loader, moved ahead of use.

    On a CUDA or XPU device the next `depth` batches are copied on a stream of their own while the
    device works on this one. Copies overlap with work only from pinned memory: give the
    `DataLoader` `pin_memory=True`. The stream in which the batches are used waits for each copy,
    and the memory of a batch is not reused before that stream is done with it. On other devices
    the batches are moved one by one, as by `move`. Nothing runs in another thread.

    A loader that fills the same buffers again for every batch must not be prefetched: the batches
    ahead would be overwritten before they are used. Call `move` in the loop, with
    `non_blocking=False` where the buffers are pinned.

    Args:
        loader: What to iterate: a `DataLoader`, a list of batches, anything iterable but a text.
            Each pass iterates it anew.
        where: A device, or the model whose inputs the batches are; it is asked again at each pass.
        depth: How many batches to move ahead of the one in use, one or more.

    Returns:
        An iterable that has a length if the loader has one. An exception of the loader is raised
        where its batch would have come.

    Raises:
        TypeError: `loader` cannot be iterated.
        InvalidDeviceError: `where` is neither a model nor a device, or the model comes first.
        DeviceUnavailableError: The device does not exist here.
        ValueError: `depth` is less than 1.

    Examples:
        >>> import devicekit, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> batches = [torch.ones(4, 2), torch.zeros(4, 2)]
        >>> [model(batch).shape[0] for batch in devicekit.prefetch(batches, model)]
        [4, 4]
    """
    return Prefetcher(loader, where, depth)


def _is_count(depth: object) -> bool:
    """Return whether it is a whole number from 1 on."""
    return isinstance(depth, int) and not isinstance(depth, bool) and depth >= 1


def _is_loader(loader: object) -> bool:
    """Return whether it can be iterated; the letters of a text are no batches."""
    if isinstance(loader, (str, bytes)):
        return False
    return isinstance(loader, Iterable) or hasattr(type(loader), "__getitem__")


class Prefetcher(Generic[_T]):
    """What `prefetch` returns."""

    def __init__(self, loader: Iterable[_T], where: nn.Module | DeviceLike, depth: int) -> None:
        if not _is_count(depth):
            msg = f"depth is {depth!r}: expected how many batches to move ahead, 1 or more."
            raise ValueError(msg)
        if isinstance(loader, nn.Module):
            msg = "the loader comes first: write prefetch(loader, model), and not the reverse."
            raise InvalidDeviceError(msg)
        if not _is_loader(loader):
            msg = (
                f"{shown(loader)} is no loader: expected a DataLoader, a list of batches or "
                f"anything else that gives batches when iterated. Write prefetch(loader, model)."
            )
            raise TypeError(msg)
        self._loader = loader
        self._where = where if isinstance(where, nn.Module) else checked_device(where)
        self._depth = depth
        self._streams: dict[torch.device, Any] = {}

    def __len__(self) -> int:
        """Return the number of batches, if the loader knows it."""
        if isinstance(self._loader, Sized):
            return len(self._loader)
        msg = f"{type(self._loader).__name__} has no length, so its prefetched batches have none."
        raise TypeError(msg)

    def __iter__(self) -> Iterator[_T]:
        """Iterate over the batches, there."""
        device = self._where if isinstance(self._where, torch.device) else device_of(self._where)
        if device.type not in STREAMED:
            return (move(batch, device) for batch in self._loader)
        return self._ahead(device)

    def _ahead(self, device: torch.device) -> Iterator[_T]:
        batches = iter(self._loader)
        waiting: deque[_Sent[_T] | Exception] = deque()
        more = True
        while True:
            while more and len(waiting) <= self._depth:
                waiting.append(self._next(batches, device))
                more = isinstance(waiting[-1], _Sent)
            first = waiting.popleft()
            if isinstance(first, StopIteration):
                return
            if isinstance(first, Exception):
                raise first
            recorded = self._hand_over(first, device)
            yield first.moved
            if not recorded:  # the memory must not be filled again before this work is done
                module = torch.get_device_module(device.type)
                self._streams[device].wait_stream(module.current_stream(device))
            del first  # the source has to live until its copy is done, and no longer

    def _next(self, batches: Iterator[_T], device: torch.device) -> _Sent[_T] | Exception:
        """Start the copy of the next batch, or return what went wrong, to raise in its turn."""
        module = torch.get_device_module(device.type)
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = _new_stream(device)
        try:
            source = next(batches)
            with module.stream(stream):
                moved = move(source, device)
        except Exception as error:
            return error
        return _Sent(moved, stream.record_event(), source)

    def _hand_over(self, sent: _Sent[_T], device: torch.device) -> bool:
        """Order the copy before the work that follows, and that before reuse of the memory.

        Returns:
            Whether the latter was possible: torch records streams for dense tensors only.
        """
        recorded = True
        stream = torch.get_device_module(device.type).current_stream(device)
        stream.wait_event(sent.copied)
        for _, leaf in walk(sent.moved, opaque=True):
            if isinstance(leaf, Tensor) and leaf.device == device:
                try:
                    leaf.record_stream(stream)
                except (NotImplementedError, RuntimeError):  # sparse, nested or quantized
                    recorded = False
        return recorded


def _new_stream(device: torch.device) -> Any:
    try:
        return torch.get_device_module(device.type).Stream(device)
    except RuntimeError as error:
        if pretended() is None:
            raise
        msg = (
            f"The batches could not be moved to {device}: it is a device of fake_devices(), where "
            f"no tensor can be made. Iterate on a device that is here, such as 'cpu'."
        )
        raise MoveError(msg, target=device) from error


class _Sent(Generic[_T]):
    """A batch that is on its way, the event of its arrival, and what it is copied from."""

    def __init__(self, moved: _T, copied: Any, source: _T) -> None:
        self.moved = moved
        self.copied = copied
        self.source = source
