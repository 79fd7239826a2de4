"""A report as text, for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from devicekit._backends.memory import format_size

if TYPE_CHECKING:
    from devicekit._inspect.report import DeviceReport, Located

__all__ = ["enumerated", "headline", "notes", "rows", "shortened", "table", "tabulated"]

_MOST = 10  # lines of one kind
_LONGEST = 48  # columns of a path in a table

Note = tuple[str, tuple[str, ...]]


# ---- the first line ------------------------------------------------------------------------------


def headline(report: DeviceReport) -> str:
    """Return what matters most about a report: the trouble by its path, or where all of it is."""
    return _elsewhere(report) or _peculiar(report) or _fine(report)


def _elsewhere(report: DeviceReport) -> str | None:
    """Say what is on another device than the rest."""
    name, home = report.name, report.home
    strays = [stray for stray in report.strays if stray.why]
    if report.away:
        if all(tensor.path in report.meta for tensor in report.away):
            return f"{_on(report.away)}, without values; the rest of {name} is on {home}."
        return f"{_on(report.away)}; the rest of {name} is on {home}."
    if strays:
        one = len(strays) == 1
        kind = "a plain attribute" if one else "plain attributes"
        return f"{_on(strays)}, but {name} is on {home}: {kind}, which .to() leaves behind."
    if report.left:
        first = report.left[0]
        return f"{first.path} is on {first.device}: {first.why}."
    if report.torn:
        (target, source), *more = report.torn
        others = f" (and {len(more)} more)" if more else ""
        return f"{target} is no longer tied to {source}{others}: they are two parameters now."
    return None


def _peculiar(report: DeviceReport) -> str | None:
    """Say what is special about an object all of which is where it belongs."""
    name, home = report.name, report.home
    if report.lazy:
        return f"{enumerated(report.lazy)} of {name} {_get(report.lazy)} a shape in the first call."
    if report.offloaded:
        names = enumerated(report.offloaded)
        return f"{names} of {name}: offloaded by accelerate, which computes on {home}."
    if report.meta and home is not None and home.type == "meta":
        return f"{enumerated(report.meta)} of {name} {_have(report.meta)} no values: on meta."
    if report.replicas:
        where = report.replicas[0] or name
        return f"{where} is a replica by DataParallel on {home}: parameters() of it is empty."
    if report.aliases:
        alias, buffer = report.aliases[0]
        return f"{alias} is a second name of {buffer} on {home}: the next .to() leaves it behind."
    if report.strays:
        names = enumerated([stray.path for stray in report.strays])
        return f"{name} is on {home}, but .to() would leave {names} behind."
    if report.mislabelled:
        wrong = report.mislabelled[0]
        return f"{wrong.path} says {wrong.device}, but {name} is on {home}."
    return None


def _fine(report: DeviceReport) -> str:
    if not report.places:
        return f"{report.name} holds no tensor."
    if len(report.places) > 1 and report.is_split:
        devices = enumerated([str(device) for device in report.devices])
        return f"{report.name} is dispatched over {devices}; its inputs go to {report.home}."
    return f"{report.name} is on {report.home}."


def _on(tensors: Sequence[Located]) -> str:
    """Return `"a and 2 more are on cpu"`; where there are several devices, of the first."""
    device = tensors[0].device
    paths = [tensor.path for tensor in tensors if tensor.device == device]
    return f"{enumerated(paths)} {'is' if len(paths) == 1 else 'are'} on {device}"


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _get(names: Sequence[str]) -> str:
    return "gets" if len(names) == 1 else "get"


def enumerated(names: Sequence[str]) -> str:
    """Return `"a"`, `"a and b"` or, where more do not fit in the line, `"a, b and 2 more"`."""
    shown = [names[0]]
    for name in names[1:]:
        if len(", ".join(shown)) + len(name) > _LONGEST - 8:
            break
        shown.append(name)
    more = len(names) - len(shown)
    last = f"{more} more" if more else shown.pop() if len(shown) > 1 else ""
    return f"{', '.join(shown)} and {last}" if last else shown[0]


# ---- what follows --------------------------------------------------------------------------------


def table(report: DeviceReport) -> str:
    """Return the whole report."""
    parts = [headline(report)]
    if report.places:
        parts.append("\n".join(tabulated(_HEADER, rows(report))))
    if report.parts:
        found = [
            (shortened(p.path), str(p.device), str(p.tensors), format_size(p.bytes))
            for p in report.parts
        ]
        header = ("sub-module", "device", "tensors", "memory")
        parts.append("\n".join(tabulated(header, _most(found), numbers=(2, 3))))
    for title, lines in notes(report):
        body = [f"  {line}" for line in lines[:_MOST]]
        if len(lines) > _MOST:
            body.append(f"  and {len(lines) - _MOST} more")
        parts.append("\n".join([title, *body]))
    return "\n\n".join(parts)


_HEADER = ("device", "parameters", "buffers", "other", "memory", "largest")


def rows(report: DeviceReport) -> list[tuple[str, ...]]:
    """Return a row for each device."""
    found: list[tuple[str, ...]] = []
    for place in report.places:
        numbers = (place.parameters, place.buffers, place.others)
        found.append(
            (
                str(place.device),
                *map(str, numbers),
                format_size(place.bytes),
                _examples(place.examples),
            )
        )
    return list(_most(found))


def _most(found: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    if len(found) <= _MOST:
        return list(found)
    more = (f"and {len(found) - _MOST} more", *("" for _ in found[0][1:]))
    return [*found[:_MOST], more]


def _examples(names: Sequence[str]) -> str:
    """Return as many names as fit, at least the first."""
    shown = shortened(names[0])
    for name in names[1:]:
        if len(shown) + len(name) + 2 > _LONGEST:
            break
        shown += f", {name}"
    return shown


def tabulated(
    header: Sequence[str], body: Sequence[Sequence[str]], numbers: Iterable[int] = (1, 2, 3, 4)
) -> list[str]:
    """Return the lines of a table; columns of numbers are flush right."""
    right = set(numbers)
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines: list[str] = []
    for row in (header, *body):
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def notes(report: DeviceReport) -> list[Note]:
    """Return what else there is to say, each with a title and lines."""
    elsewhere = tuple(tensor for tensor in report.away if tensor.path not in report.meta)
    found: list[Note] = [
        ("On another device than the rest:", _located(elsewhere)),
        ("Strays, which .to() does not move; make them buffers:", _located(report.strays)),
        (
            "Second names of buffers, which the next .to() leaves behind:",
            tuple(f"{shortened(a)} is {shortened(b)}" for a, b in report.aliases),
        ),
        (
            "Maybe a second name of a buffer that .to() has replaced; use the buffer itself:",
            tuple(f"{shortened(a)} has the shape of {shortened(b)}" for a, b in report.stale),
        ),
        ("Of the optimizer:", _located(report.left)),
        (
            "Declared to be tied, but are not; call model.tie_weights():",
            tuple(f"{shortened(a)} and {shortened(b)}" for a, b in report.torn),
        ),
        (
            "Tied:",
            tuple(
                " = ".join(map(shortened, names[:2])) + _more(names[2:]) for names in report.ties
            ),
        ),
        ("Without a shape until the first call:", _paths(report.lazy)),
        ("Without values; load_state_dict(..., assign=True) gives them some:", _paths(report.meta)),
        ("Offloaded by accelerate until they are used:", _paths(report.offloaded)),
        ("Quantized:", _paths(report.quantized)),
        ("Sharded over several processes:", _paths(report.sharded)),
        (
            "Replicas made by DataParallel:",
            tuple(shortened(p) or report.name for p in report.replicas),
        ),
        ("Attributes that name a device where nothing is:", _located(report.mislabelled)),
        ("Devices written into a graph, which .to() does not change:", report.baked),
    ]
    return [(title, lines) for title, lines in found if lines]


def _located(tensors: Sequence[Located]) -> tuple[str, ...]:
    found: list[str] = []
    for tensor in tensors:
        dtype = "" if tensor.dtype is None else str(tensor.dtype).removeprefix("torch.")
        shape = "" if tensor.shape is None else f" {tuple(tensor.shape)}"
        why = f": {tensor.why}" if tensor.why else ""
        found.append(f"{shortened(tensor.path)} on {tensor.device}  {dtype}{shape}{why}".rstrip())
    return tuple(found)


def _paths(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(shortened, names))


def _more(names: Sequence[str]) -> str:
    return f" and {len(names)} more" if names else ""


def shortened(path: str) -> str:
    """Return a path that fits in a column; what is left out of it is its middle."""
    if len(path) <= _LONGEST:
        return path
    half = (_LONGEST - 3) // 2
    return f"{path[:half]}...{path[-half:]}"
