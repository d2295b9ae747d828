"""Sizes and durations as text: parse what users write, and print what they read."""

import re

from lightning_paral.errors import ConfigurationError

_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[kmgt]?)(?P<binary>i?)b?\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float, name: str) -> int:
    """Return a size in bytes.

    Args:
        text: a number of bytes, or text such as `80GiB` (binary), `500MB` (decimal) or `64k`.
        name: what the size is for, at the beginning of an error, for example `--device-memory`.

    Raises:
        ConfigurationError: the text is not a size, or the size is not positive.
    """
    match = _SIZE.fullmatch(str(text))
    size = 0
    if match and (match["unit"] or not match["binary"]):
        factor = (1024 if match["binary"] else 1000) ** " kmgt".index(match["unit"].lower() or " ")
        size = int(float(match["number"]) * factor)
    if size < 1:
        raise ConfigurationError(f"{name} {text!r} is not a size. Give a size such as 80GiB, 500MB or 64KiB.")
    return size


def format_bytes(size: float) -> str:
    """Return a size in bytes as text with a binary unit, for example `31.4 GiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    digits = 0 if units[0] == "B" else 2 if abs(size) < 10 else 1 if abs(size) < 100 else 0
    return f"{size:.{digits}f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text with three digits, for example `12.3 ms`."""
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    value = seconds * factor
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"
