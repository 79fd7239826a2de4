"""A report as HTML, for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from devicekit._backends.memory import format_size
from devicekit._inspect.text import headline, notes, rows, shortened

if TYPE_CHECKING:
    from devicekit._inspect.report import DeviceReport, Part, Place

__all__ = ["page"]

_MOST = 10  # lines of one kind that are open to the reader

# Every colour is the reader's own, or lies half way between light and dark.
_TEXT = "font:13px/1.5 system-ui,sans-serif;color:inherit;max-width:60em"
_CELL = "padding:3px 12px 3px 0;text-align:{};vertical-align:middle;background:none;border:0"
_TRACK = (
    "display:inline-block;width:9em;height:9px;border-radius:3px;background:rgba(128,128,128,.28)"
)
_BAR = "height:9px;border-radius:3px;background:{};width:{:.4g}%;min-width:2px"
_CODE = "font-family:ui-monospace,monospace;font-size:12px;background:none;color:inherit;padding:0"
_COLOURS = ("#4c8dd6", "#d9822b", "#3fa66a", "#b565c8", "#c9536b", "#7d8a97")


def page(report: DeviceReport) -> str:
    """Return the whole report."""
    parts = [f"<p style='margin:0 0 6px;font-weight:600'>{escape(headline(report))}</p>"]
    if report.places:
        parts.append(_places(report))
    if report.parts:
        parts.append(_parts(report.parts))
    parts += [_note(title, lines) for title, lines in notes(report)]
    return f"<div style='{_TEXT}'>{''.join(parts)}</div>"


def _places(report: DeviceReport) -> str:
    total = sum(place.bytes for place in report.places) or 1
    header = ("device", "share of memory", "", "parameters", "buffers", "other", "largest")
    body: list[list[str]] = []
    for index, (place, row) in enumerate(zip(report.places[:_MOST], rows(report), strict=False)):
        colour = _COLOURS[min(index, len(_COLOURS) - 1)]
        device, parameters, buffers, others, memory, examples = map(escape, row)
        numbers = [parameters, buffers, others]
        bar = _bar(place, place.bytes / total, colour)
        body.append([f"<b>{device}</b>", bar, memory, *numbers, _code(examples)])
    hidden = len(report.places) - len(body)
    if hidden:
        body.append([f"and {hidden} more", *[""] * (len(header) - 1)])
    return _table(header, body, right=(2, 3, 4, 5))


def _bar(place: Place, share: float, colour: str) -> str:
    label = escape(f"{place.device}: {share:.1%} of the memory")
    filled = f"<div style='{_BAR.format(colour, 100 * share)}'></div>"
    return f"<div role='img' aria-label='{label}' title='{label}' style='{_TRACK}'>{filled}</div>"


def _parts(parts: Sequence[Part]) -> str:
    body = [
        [
            _code(escape(shortened(p.path))),
            escape(str(p.device)),
            str(p.tensors),
            format_size(p.bytes),
        ]
        for p in parts[:_MOST]
    ]
    if len(parts) > _MOST:
        body.append([f"and {len(parts) - _MOST} more", "", "", ""])
    return _table(("sub-module", "device", "tensors", "memory"), body, right=(2, 3))


def _note(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_code(escape(line))}</li>" for line in lines[:_MOST])
    if len(lines) > _MOST:
        items += f"<li>and {len(lines) - _MOST} more</li>"
    style = "margin:0 0 4px;padding-left:1.5em"
    return f"<p style='margin:6px 0 0'>{escape(title)}</p><ul style='{style}'>{items}</ul>"


def _table(header: Sequence[str], body: Iterable[Sequence[str]], right: Iterable[int]) -> str:
    sides = ["right" if column in set(right) else "left" for column in range(len(header))]

    def line(cells: Sequence[str], tag: str, extra: str) -> str:
        inner = "".join(
            f"<{tag} style='{_CELL.format(side)}{extra}'>{cell}</{tag}>"
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr style='background:none'>{inner}</tr>"

    lines = [line([escape(h) for h in header], "th", ";font-weight:400;opacity:.7")]
    lines += [line(cells, "td", "") for cells in body]
    style = "border-collapse:collapse;margin:0 0 6px;color:inherit;font-size:13px"
    return f"<table style='{style}'>{''.join(lines)}</table>"


def _code(text: str) -> str:
    """Return text that is escaped already as code."""
    return f"<code style='{_CODE}'>{text}</code>"
