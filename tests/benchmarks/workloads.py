"""The workloads of the benchmarks, and the code that one would write by hand for each."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

try:
    from transformers import BatchEncoding as Encoding
except ImportError:
    Encoding = UserDict

__all__ = ["WORKLOADS", "Workload"]

Row = namedtuple("Row", "image mask label note")


@dataclass
class Sample:
    a: Any
    b: Any
    c: Any
    d: Any
    e: Any
    f: Any
    index: int
    name: str


@dataclass(frozen=True)
class Workload:
    """A structure to move, and specialised code that moves it, and that only looks at it."""

    title: str
    make: Callable[[], Any]
    by_hand: Callable[[Any, torch.device], Any]
    limit: Callable[[Any, torch.device], bool]
    bar_no_op: float | None = None
    bar_moving: float | None = None


def _t() -> torch.Tensor:
    return torch.ones(2, 3)


def _dict(width: int) -> dict[str, torch.Tensor]:
    return {f"key{i}": _t() for i in range(width)}


def _rows() -> dict[str, list[Row]]:
    first = [Row(_t(), _t(), i, None) for i in range(16)]
    return {"first": first, "second": [Row(_t(), _t(), "name", None) for _ in range(16)]}


def _nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"x": _t()}
    for _ in range(levels - 1):
        inner = {"x": _t(), "next": inner}
    return inner


def _nested_by_hand(x: dict[str, Any], device: torch.device) -> dict[str, Any]:
    new = {"x": x["x"].to(device)}
    if "next" in x:
        new["next"] = _nested_by_hand(x["next"], device)
    return new


def _nested_limit(x: dict[str, Any], device: torch.device) -> bool:
    while x["x"].device == device and "next" in x:
        x = x["next"]
    return bool(x["x"].device == device)


def _flat_by_hand(x: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {key: value.to(device) for key, value in x.items()}


def _flat_limit(x: dict[str, torch.Tensor], device: torch.device) -> bool:
    for value in x.values():  # noqa: SIM110  # faster than `all` of a generator
        if value.device != device:
            return False
    return True


def _rows_limit(x: dict[str, list[Row]], device: torch.device) -> bool:
    for rows in x.values():
        for row in rows:
            if row.image.device != device or row.mask.device != device:
                return False
    return True


def _sample_limit(x: Sample, device: torch.device) -> bool:
    for value in (x.a, x.b, x.c, x.d, x.e, x.f):  # noqa: SIM110
        if value.device != device:
            return False
    return True


WORKLOADS = {
    "W1": Workload("a tensor", _t, lambda x, d: x.to(d), lambda x, d: x.device == d, 0.80, 1.4),
    "W2": Workload("a dict of 8", lambda: _dict(8), _flat_by_hand, _flat_limit, 0.45, 1.4),
    "W3": Workload(
        f"a {Encoding.__name__} of 4",
        lambda: Encoding(_dict(4)),
        lambda x, d: Encoding({k: v.to(d) for k, v in x.items()}),
        lambda x, d: _flat_limit(x.data, d),
        0.35,
        1.35,
    ),
    "W4": Workload(
        "a dict of lists of 32 namedtuples",
        _rows,
        lambda x, d: {
            k: [Row(r.image.to(d), r.mask.to(d), r.label, r.note) for r in rows]
            for k, rows in x.items()
        },
        _rows_limit,
        0.65,
        1.7,
    ),
    "W5": Workload("a dict of 1,000", lambda: _dict(1000), _flat_by_hand, _flat_limit, 0.33, 1.35),
    "W6": Workload(
        "50 nested dicts", lambda: _nested(50), _nested_by_hand, _nested_limit, 1.2, 2.1
    ),
    "W7d": Workload(
        "10,000 ints and a tensor",
        lambda: {"labels": list(range(10_000)), "image": _t()},
        lambda x, d: {"labels": x["labels"], "image": x["image"].to(d)},
        lambda x, d: x["image"].device == d,
    ),
    "W8": Workload(
        "a dataclass of 8",
        lambda: Sample(_t(), _t(), _t(), _t(), _t(), _t(), 3, "name"),
        lambda x, d: Sample(
            x.a.to(d), x.b.to(d), x.c.to(d), x.d.to(d), x.e.to(d), x.f.to(d), x.index, x.name
        ),
        _sample_limit,
        0.60,
        1.6,
    ),
}
