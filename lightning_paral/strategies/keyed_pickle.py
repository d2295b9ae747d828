"""Pickle values that refer to objects which exist in both processes, by keys in place of these objects."""

import io
import pickle
from collections.abc import Mapping
from typing import Any

from torch import Tensor

Key = tuple[str, ...]
"""A name of an object that exists in both processes, such as `("module", "blocks.0")`."""


def pickle_with_keys(value: object, keys: Mapping[int, Key], limit: int | None) -> bytes | None:
    """Return `value` pickled; `None` if it cannot be pickled, or if it is too large.

    Args:
        value: any object.
        keys: the keys of the objects that exist in both processes, by their `id`.
        limit: the largest number of bytes, also of one tensor; `None` for any.
    """
    buffer = _Limited(limit)
    try:
        _Pickler(buffer, keys, limit).dump(value)
    except Exception:  # any object may raise anything when it is pickled
        return None
    return buffer.getvalue()


def unpickle_with_keys(pickled: bytes, objects: Mapping[Key, Any]) -> Any:
    """Return the value that `pickle_with_keys` has pickled, with this process's objects in place of their keys."""
    return _Unpickler(pickled, objects).load()


class _Limited(io.BytesIO):
    """A buffer that refuses more than a number of bytes."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any) -> int:
        if self._limit is not None and self.tell() + memoryview(data).nbytes > self._limit:
            raise OverflowError
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Replaces objects that exist in both processes by their keys."""

    def __init__(self, buffer: io.BytesIO, keys: Mapping[int, Key], limit: int | None) -> None:
        super().__init__(buffer, protocol=5)
        self._keys, self._limit = keys, limit

    def persistent_id(self, value: Any) -> Key | None:
        if isinstance(value, Tensor) and self._limit is not None and value.nbytes > self._limit:
            raise OverflowError
        return self._keys.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, objects: Mapping[Key, Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._objects = objects

    def persistent_load(self, key: Any) -> Any:
        return self._objects[key]
