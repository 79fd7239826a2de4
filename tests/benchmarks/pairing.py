"""Compare functions in one process, as ratios that a noisy neighbour does not change.

All contestants run interleaved in random order; each ratio is the median of the ratios within one
round, in processor time of this thread, with the garbage collector off.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping

__all__ = ["measure", "ratios", "verdict"]

_CALIBRATION = 2e6  # nanoseconds that one contestant runs in one round, about


def measure(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int = 61
) -> dict[str, list[float]]:
    """Return the nanoseconds per call of each contestant in each round."""
    calls = {name: _calls(function) for name, function in contestants.items()}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                function, number = contestants[name], calls[name]
                begin = time.thread_time_ns()
                for _ in range(number):
                    function()
                times[name].append((time.thread_time_ns() - begin) / number)
    finally:
        gc.enable()
    return times


def _calls(function: Callable[[], object]) -> int:
    function()
    number, begin = 0, time.thread_time_ns()
    while time.thread_time_ns() - begin < _CALIBRATION:
        function()
        number += 1
    return max(1, number)


def ratios(times: Mapping[str, list[float]], reference: str) -> dict[str, float]:
    """Return the median ratio of each contestant to the reference, paired by round."""
    return {
        name: statistics.median(a / b for a, b in zip(own, times[reference], strict=True))
        for name, own in times.items()
    }


def verdict(value: float, bar: float) -> str:
    """Return what to print beside a figure for which smaller is better."""
    return f"{'meets' if value <= bar else 'falls short of'} {bar:g}"
