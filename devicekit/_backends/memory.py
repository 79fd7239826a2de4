"""Amounts of memory as people write them."""

from __future__ import annotations

import re

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("i", 1024), ("", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}


def parse_size(size: int | str | None) -> int:
    """Return a number of bytes, given as one or as a text such as `"8GiB"`; None is 0.

    Raises:
        ValueError: It is not a size.

    Examples:
        >>> parse_size("8GiB"), parse_size("1.5 GB"), parse_size(None)
        (8589934592, 1500000000, 0)
    """
    if size is None:
        return 0
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = (
        re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", size)
        if isinstance(size, str)
        else None
    )
    unit = match and {name.lower(): factor for name, factor in _UNITS.items()}.get(
        match.group(2).lower()
    )
    if match is None or unit is None:
        msg = (
            f"{size!r} is not an amount of memory: expected a number of bytes, "
            f"or a text such as '8GiB' or '500MB'."
        )
        raise ValueError(msg)
    whole, _, fraction = match.group(1).partition(".")
    return int(int(whole + fraction) * unit // 10 ** len(fraction))  # exact, unlike a float


def format_size(size: int) -> str:
    """Return a number of bytes as people read it.

    Examples:
        >>> format_size(8 << 30), format_size(1 << 70)
        ('8.0 GiB', 'over 1 EiB')
    """
    if size > 1 << 60:  # on no machine; and a float and a text of an int have an end
        return "over 1 EiB"
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
