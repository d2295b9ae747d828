"""Sizes and durations as text: parse what users write, and print what they read."""

import re

from lightning_paral.errors import ConfigurationError

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "p": 1000**5}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float, name: str) -> int:
    """Return a size in bytes.

    Args:
        text: a number of bytes, or text such as `80GiB` (binary), `500MB` (decimal) or `64k`.
        name: what the size is for, at the beginning of an error, for example `--device-memory`.

    Raises:
        ConfigurationError: the text is not a size, or the size is not positive.
    """
    match = _SIZE.fullmatch(str(text))
    factor = {**_UNITS, **_BINARY_UNITS}.get(match["unit"].lower()) if match else None
    size = int(float(match["number"]) * factor) if match and factor else 0
    if size < 1:
        raise ConfigurationError(f"{name} {text!r} is not a size. Give a size such as 80GiB, 500MB or 64KiB.")
    return size


def format_bytes(size: float) -> str:
    """Return a size in bytes as text with a binary unit, for example `31.4 GiB`."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    if size < 1024:
        return f"{sign}{size:.0f} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    size /= 1024
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    unit = units[0]
    return f"{sign}{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text with three digits, for example `12.3 ms`."""
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    value = seconds * factor
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"
