"""Check pickled states of numpy dtypes and arrays before numpy uses them."""

from math import prod
from typing import Any

import numpy

from lightning_paral.checkpoint.safe_load.opcodes import Made, PickleError

_REFCOUNT_FLAGS = 0b111  # numpy's flags for elements that are objects: refcounted, list-pickled, item pointer
_OBJECT_FLAGS = 63  # all flags of the dtype `object`


def check_dtype(code: str, state: Any) -> None:
    """Raise a `PickleError` if numpy would read memory as objects, or read fields beyond the end of an element.

    Args:
        code: the first argument of `numpy.dtype`, such as `"f8"`.
        state: the pickled state of the dtype.
    """
    fits = type(state) is tuple and 8 <= len(state) <= 9 and type(state[7]) is int and state[1] in ("<", ">", "|", "=")
    if fits:
        _, _, subarray, names, fields, size, alignment, flags = state[:8]
        expected = _sized(code) if code[0] in "SUV" else -1
        fits = subarray is None and size == expected and type(size) is int and alignment in _ALIGNMENTS
        fits = fits and all(_is_unit(unit) for unit in state[8:])
        fits &= flags == _OBJECT_FLAGS if code[0] == "O" else flags >= 0 and not flags & _REFCOUNT_FLAGS
        if fits and (names is not None or fields is not None):
            fits = code[0] == "V" and type(names) is tuple and type(fields) is dict and set(names) == set(fields)
            fits = fits and all(_is_field(field, size) for field in fields.values())
    if not fits:
        raise PickleError(f"it sets the state of a numpy.dtype to {state!r:.200}, which numpy does not write")


_ALIGNMENTS = (-1, 1, 2, 4, 8, 16)


def _is_unit(unit: Any) -> bool:
    """Return whether `unit` is the unit of a time dtype, `(metadata, (name, *counts))`, without metadata."""
    if type(unit) is not tuple or len(unit) != 2 or unit[0] not in (None, {}) or type(unit[1]) is not tuple:
        return False
    name, *counts = unit[1]
    return type(name) in (bytes, str) and all(type(count) is int and 0 < count < 2**31 for count in counts)


def _is_field(field: Any, size: int) -> bool:
    if type(field) is not tuple or len(field) < 2 or type(field[0]) is not Made or type(field[1]) is not int:
        return False
    dtype, offset = field[:2]
    plain = dtype.by == "numpy.dtype" and dtype.args[0][0] != "O"
    return bool(plain and 0 <= offset <= size - item_bytes(dtype))


def _sized(code: str) -> int:
    return int(code[1:] or 0) * (4 if code[0] == "U" else 1)


def item_bytes(dtype: Made) -> int:
    """Return the size of an element of a `numpy.dtype` in bytes."""
    return _sized(dtype.args[0]) if dtype.args[0][0] in "SUV" else numpy.dtype(dtype.args[0]).itemsize


def check_array(state: Any) -> None:
    """Raise a `PickleError` if the bytes of an array do not match its shape and dtype."""
    fits = type(state) is tuple and len(state) == 5 and type(state[1]) is tuple and type(state[2]) is Made
    fits = fits and all(type(n) is int and 0 <= n < 2**63 for n in state[1]) and state[2].by == "numpy.dtype"
    if fits:
        _, shape, dtype, _, values = state
        if dtype.args[0][0] == "O":
            fits = type(values) is list and len(values) == prod(shape)
        else:
            fits = type(values) is bytes and len(values) == prod(shape) * item_bytes(dtype)
    if not fits:
        raise PickleError("it has an array whose data does not match its shape and dtype")
