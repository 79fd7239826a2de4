"""The Python handle on a loaded fake driver: what a test sees and sets below torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

__all__ = ["COUNTERS", "MAX_DEVICES", "DefaultGenerator", "Driver"]

# The order of `enum Counter` in driver.cpp.
COUNTERS = (
    *("h2d", "d2h", "d2d", "p2p"),  # transfers: host to device, device to host, within, between
    "nonblocking",  # those of them that were asked not to block
    "fallback",  # operators that the CPU computed
    "sync",  # waits of the host: synchronize() of anything, item()
    "allocs",
    "ooms",
    "races",  # uses of memory by two streams that nothing orders (only with async copies)
)
MAX_DEVICES = 16
GIB = 1 << 30
_FAIL_POINTS = {"allocation": 0, "copy": 1}
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "fake_set_memory": (None, [ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]),
    "fake_total": (ctypes.c_size_t, [ctypes.c_int]),
    "fake_free": (ctypes.c_size_t, [ctypes.c_int]),
    "fake_used": (ctypes.c_size_t, [ctypes.c_int]),
    "fake_peak": (ctypes.c_size_t, [ctypes.c_int]),
    "fake_stream": (ctypes.c_int64, [ctypes.c_int]),
    "fake_last_race": (ctypes.c_char_p, []),
    "fake_counter": (ctypes.c_int64, [ctypes.c_int]),
    "fake_block_op": (None, [ctypes.c_char_p, ctypes.c_int]),
    "fake_fail": (None, [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
    "fake_seed": (None, [ctypes.c_int, ctypes.c_uint64]),
    "fake_rng_state_size": (ctypes.c_size_t, []),
    "fake_get_rng_state": (None, [ctypes.c_int, ctypes.c_void_p]),
    "fake_set_rng_state": (None, [ctypes.c_int, ctypes.c_void_p]),
}


class Driver:
    """The fake driver of this process.

    A new machine has `devices` devices of one GiB, copies that are done when they return, and no
    context anywhere; `reset` brings it back to that, contexts aside.
    """

    def __init__(self, library: Path, *, devices: int) -> None:
        # Global symbols: torch finds the registrations of the library by its own.
        self.lib = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments
        self.devices = devices
        self.reset()

    def reset(self) -> None:
        """Undo every setting below; what the devices hold and the counters stay."""
        self.async_copies(on=False)
        self.block_float64(on=False)
        self.lib.fake_unblock_ops()
        for point in _FAIL_POINTS.values():
            self.lib.fake_fail(point, 0, 0)
        for index in range(MAX_DEVICES):
            self.set_memory(index, GIB)
        self.set_device_count(self.devices)
        self.set_current_device(0)

    # The machine

    def device_count(self) -> int:
        """Return how many devices there are now."""
        return int(self.lib.fake_device_count())

    def set_device_count(self, count: int) -> None:
        """Plug devices in or out (at most 16)."""
        if not 0 <= count <= MAX_DEVICES:
            msg = f"{count!r} is not a number of devices from 0 to {MAX_DEVICES}."
            raise ValueError(msg)
        self.lib.fake_set_device_count(count)

    def current_device(self) -> int:
        """Return the index of this thread's current device."""
        return int(self.lib.fake_device())

    def set_current_device(self, device: int) -> None:
        """Change this thread's current device; makes no context."""
        self.lib.fake_set_device(device)

    def contexts(self) -> set[int]:
        """Return the devices on which this process has made a context, which costs memory."""
        return {i for i in range(MAX_DEVICES) if self.lib.fake_has_context(i)}

    def make_context(self, device: int) -> None:
        """Make a context, as the first use of a device does."""
        self.lib.fake_set_context(device, 1)

    def reset_contexts(self) -> None:
        """Forget the contexts made so far."""
        for index in range(MAX_DEVICES):
            self.lib.fake_set_context(index, 0)

    # Memory

    def set_memory(self, device: int, total: int, *, others: int = 0) -> None:
        """Give a device so many bytes, of which other processes hold some."""
        self.lib.fake_set_memory(device, total, others)

    def mem_info(self, device: int) -> tuple[int, int]:
        """Return the free and the total bytes of a device; makes no context."""
        return self.lib.fake_free(device), self.lib.fake_total(device)

    def used(self, device: int) -> int:
        """Return the bytes that this process holds on a device."""
        return int(self.lib.fake_used(device))

    def peak(self, device: int) -> int:
        """Return the most bytes held at once since `reset_counters`."""
        return int(self.lib.fake_peak(device))

    def reset_peak(self, device: int) -> None:
        """Let the peak start from what is used now."""
        self.lib.fake_reset_peak(device)

    def fail_after(
        self, n: int, at: Literal["allocation", "copy"] = "allocation", *, times: int = 1
    ) -> None:
        """Make the n-th allocation or transfer from now on run out of memory (1: the next).

        The ones after it succeed again, so that undoing can work; `times` makes more of them fail.
        Transfers are those that `counters` counts, not the inner copies of an operator.
        """
        self.lib.fake_fail(_FAIL_POINTS[at], n, times)

    # Copies, streams

    def async_copies(self, *, on: bool = True) -> None:
        """Let non-blocking copies happen as late as the rules of CUDA allow.

        Until the reader's stream (or the host) has waited for a copy, its target holds NaN. Uses
        of one block by two streams that no wait and no `record_stream` orders count as `races`.
        """
        self.lib.fake_set_async(int(on))

    def stream(self, device: int) -> int:
        """Return the id of this thread's current stream on a device."""
        return int(self.lib.fake_stream(device))

    def synchronize(self, device: int) -> None:
        """Wait for everything queued on a device."""
        self.lib.fake_synchronize(device)

    def pending(self, device: int) -> int:
        """Return how many copies and waits are queued on the streams of a device."""
        return int(self.lib.fake_pending(device))

    def last_race(self) -> str:
        """Say which race was seen last; empty if there was none."""
        race: bytes = self.lib.fake_last_race()
        return race.decode()

    # Counters

    def counters(self) -> dict[str, int]:
        """Return everything counted since `reset_counters`; the keys are `COUNTERS`."""
        return {name: self.lib.fake_counter(i) for i, name in enumerate(COUNTERS)}

    def reset_counters(self) -> None:
        """Count from zero again, and let the peaks start from what is used now."""
        self.lib.fake_reset_counters()
        for index in range(MAX_DEVICES):
            self.reset_peak(index)

    @contextlib.contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Give a dict that holds, after the block, what was counted inside."""
        before, counted = self.counters(), dict[str, int]()
        yield counted
        counted.update({name: n - before[name] for name, n in self.counters().items()})

    # What the devices cannot do

    def block_op(self, name: str, *, on: bool = True) -> None:
        """Pretend that an operator, such as `aten::_linalg_svd`, has no kernel for this device."""
        self.lib.fake_block_op(name.encode(), int(on))

    def block_float64(self, *, on: bool = True) -> None:
        """Refuse float64 and complex128 as MPS does."""
        self.lib.fake_block_float64(int(on))

    # Random numbers

    def seed(self, device: int, seed: int) -> None:
        """Seed the default generator of a device."""
        self.lib.fake_seed(device, seed & (2**64 - 1))

    def rng_state(self, device: int) -> torch.Tensor:
        """Return a copy of the state of a device's default generator."""
        import torch  # not above: the driver must be loadable before torch

        state = torch.empty(self.lib.fake_rng_state_size(), dtype=torch.uint8)
        self.lib.fake_get_rng_state(device, state.data_ptr())
        return state

    def set_rng_state(self, device: int, state: torch.Tensor) -> None:
        """Set the state of a device's default generator."""
        state = state.cpu().contiguous()
        self.lib.fake_set_rng_state(device, state.data_ptr())


class DefaultGenerator:
    """The default generator of a device, with the methods that `torch.cuda` and its like call."""

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver, self._index = driver, index

    def manual_seed(self, seed: int) -> None:
        self._driver.seed(self._index, seed)

    def seed(self) -> None:
        self.manual_seed(int.from_bytes(os.urandom(8), "little"))

    def get_state(self) -> torch.Tensor:
        return self._driver.rng_state(self._index)

    def set_state(self, state: torch.Tensor) -> None:
        self._driver.set_rng_state(self._index, state)
