"""Sizes and durations as text: parse what users write, and print what they read."""

import re

from lightning_paral.errors import ConfigurationError

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4, "p": 1000**5}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[kmgt]?i?)b?\s*", re.IGNORECASE)

_NUMBER = r"\s*(?P<number>(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"((?P<unit>([kKmMgGtT]i?)?)(?P<per>bits?|b|B)(/s|ps)?)?\s*")
_FLOPS = re.compile(_NUMBER + r"(?P<unit>[kmgtp]?)(flops?(/s)?|flop/s)?\s*", re.IGNORECASE)
_SECONDS = re.compile(_NUMBER + r"(?P<unit>(s|ms|us|µs|ns)?)\s*")


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


def parse_bandwidth(text: str | float, name: str) -> float:
    """Return a bandwidth in bytes per second.

    Args:
        text: a number of bytes per second, or text: bits such as `400Gbit` or `1Gbit/s`, or bytes such as `50GB/s` or
            `900GiB/s`.
        name: what the bandwidth is for, at the beginning of an error, for example `--link`.

    Raises:
        ConfigurationError: the text is not a bandwidth, or it is not positive.
    """
    match = _BANDWIDTH.fullmatch(str(text))
    value = float(match["number"]) * _factor(match["unit"] or "") if match else 0.0
    if match and (match["per"] or "B") != "B":
        value /= 8
    if not value > 0:
        raise ConfigurationError(
            f"{name} {text!r} is not a bandwidth. Give bits or bytes per second, such as 400Gbit or 50GB/s."
        )
    return value


def parse_flops(text: str | float, name: str) -> float:
    """Return a number of floating-point operations per second.

    Args:
        text: a number, or text such as `790T`, `790TFLOPS` or `1.2P`.
        name: what the number is for, at the beginning of an error, for example `--flops`.

    Raises:
        ConfigurationError: the text is no such number, or it is not positive.
    """
    match = _FLOPS.fullmatch(str(text))
    value = float(match["number"]) * _factor(match["unit"]) if match else 0.0
    if not value > 0:
        raise ConfigurationError(
            f"{name} {text!r} is not a number of floating-point operations per second. Give one such as 790T or 50G."
        )
    return value


def parse_seconds(text: str | float, name: str) -> float:
    """Return a duration in seconds, which may be 0.

    Args:
        text: a number of seconds, or text such as `20us`, `1.5ms` or `3s`.
        name: what the duration is for, at the beginning of an error, for example `--latency`.

    Raises:
        ConfigurationError: the text is not a duration.
    """
    match = _SECONDS.fullmatch(str(text))
    if match is None:
        raise ConfigurationError(f"{name} {text!r} is not a duration. Give one such as 20us or 1.5ms.")
    return float(match["number"]) * {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}[match["unit"]]


def _factor(unit: str) -> int:
    return {**_UNITS, **_BINARY_UNITS}[unit.lower()]


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
