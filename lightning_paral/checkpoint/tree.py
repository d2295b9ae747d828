"""Nested dicts and lists of a checkpoint: find, replace and insert values by path."""

import re
from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

from torch import Tensor

from lightning_paral.checkpoint.shards import is_sharded

TreePath = tuple[str | int, ...]
"""Keys of dicts and indices of lists, from the outermost container inwards."""

CURRENT_KEY = "current_model_state"
"""Key under which Lightning's `WeightAveraging` saves the weights; `state_dict` then contains their averages."""

WEIGHT_KEYS = ("state_dict", CURRENT_KEY)
"""Keys of a checkpoint whose values are results of `Module.state_dict`."""


def is_state_key(key: str) -> bool:
    """Return whether a checkpoint has weights or optimizer states under `key`: all their tensors are saved apart."""
    return key in (*WEIGHT_KEYS, "optimizer_states") or re.fullmatch(r"optimizer_\d+", key) is not None


def tensors_in(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Tensor]]:
    """Yield the tensors in nested dicts and lists, each with its path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, MutableMapping):
        for key, value in tree.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from tensors_in(value, (*path, number))


def replace_at(tree: Any, values: Mapping[TreePath, Any], path: TreePath = ()) -> Any:
    """Return a copy of nested dicts and lists in which the values at the paths in `values` are replaced.

    Args:
        tree: nested dicts and lists, which are not changed.
        values: the new values by path.
        path: the path of `tree`, for the recursion.
    """
    if path in values:
        return values[path]
    if isinstance(tree, MutableMapping):
        changed = copy(tree)  # preserves attributes of an OrderedDict, such as `_metadata` of a state_dict
        for key, value in tree.items():  # not `update`, which adds in a `Counter`
            changed[key] = replace_at(value, values, (*path, key))
        return changed
    if isinstance(tree, list):
        replaced = copy(tree)
        replaced[:] = [replace_at(value, values, (*path, number)) for number, value in enumerate(tree)]
        return replaced
    return tree


def insert(tree: dict[str, Any], path: TreePath, value: Any, gaps_left: list[int]) -> None:
    """Set the value at `path`, creating missing dicts and lists. An int in `path` is an index of a list.

    Args:
        tree: the outermost dict, changed in place.
        path: the path at which to set `value`.
        value: any object.
        gaps_left: a list with one number, which several calls share and decrease: how many list elements they may still
            create without a value, because an index skips them.

    Raises:
        ValueError: an index skips more list elements than `gaps_left` allows.
        TypeError: a value in `path` is neither a dict nor a list.
    """
    container: Any = tree
    step: Any
    for step, next_step in zip(path, (*path[1:], None), strict=True):
        if isinstance(container, list):
            if not isinstance(step, int):
                raise TypeError(f"{step!r:.100} is not an index of a list")
            gaps_left[0] -= max(0, step - len(container))
            if gaps_left[0] < 0:
                raise ValueError(f"index {step} is too large")
            container.extend([None] * (step + 1 - len(container)))
        elif not isinstance(container, dict):
            raise TypeError(f"{step!r:.100} is in a {type(container).__name__}")
        if next_step is None:
            container[step] = value
            return
        inner = container[step] if isinstance(container, list) or step in container else None
        if inner is None:
            inner = container[step] = [] if isinstance(next_step, int) else {}
        container = inner


def view_key(value: Tensor) -> Any:
    """Return a key that is equal for two tensors if they are the same view of the same memory."""
    if is_sharded(value) or value.is_meta or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg()
