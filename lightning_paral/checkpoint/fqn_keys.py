"""Optimizer states keyed by FQN instead of numbers, and in them the states of several pipeline stages together."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lightning_paral.checkpoint.optimizer_state import OTHER_ENTRIES_KEY, other_entries, to_fqn_keys, to_int_keys
from lightning_paral.checkpoint.tree import (
    WEIGHT_KEYS,
    SavedTensor,
    TreePath,
    host_copy,
    insert,
    is_state_key,
    name_of,
    replace_at,
    tensors_in,
)
from lightning_paral.checkpoint.weights import PACKAGE_STATE_KEY
from lightning_paral.compat.torch.modules import set_versions, versions_in
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError

_OPTIMIZER_KEY = re.compile(r"optimizer_(\d+)")


def by_fqn(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with entries `optimizer_0`, ..., keyed by FQN, in place of `optimizer_states`."""
    tree = dict(checkpoint)
    states = tree.pop("optimizer_states", [])
    tree |= {f"optimizer_{number}": to_fqn_keys(state) for number, state in enumerate(states)}
    others = [other_entries(state) for state in states]
    if any(others):
        tree[OTHER_ENTRIES_KEY] = others
    tree.setdefault("state_dict", {})
    return tree


def by_int(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint in Lightning's format, keyed by int, from one that `by_fqn` made."""
    numbers = sorted(int(found[1]) for found in map(_OPTIMIZER_KEY.fullmatch, tree) if found)
    states = [to_int_keys(tree[f"optimizer_{number}"]) for number in numbers]
    checkpoint = {
        key: value for key, value in tree.items() if not _OPTIMIZER_KEY.fullmatch(key) and key != OTHER_ENTRIES_KEY
    }
    if states:
        empty: dict[str, Any] = {}
        pairs = zip_longest(tree.get(OTHER_ENTRIES_KEY, ()), states, fillvalue=empty)
        checkpoint["optimizer_states"] = [other | state for other, state in pairs]
    return checkpoint


def merge_stages(
    tree: dict[str, Any], tensors: Sequence[SavedTensor], ranks: RankGroup, stages: Sequence[int], what: str
) -> tuple[dict[str, Any], list[SavedTensor]]:
    """Return rank 0's `tree` with what only other stages have, and the tensors that no earlier stage has. *Collective*.

    Groups of parameters are merged by index. Where several stages have an entry, that of the first stage is used. Of
    other entries, only the shards that callbacks keep are added.

    Args:
        tree: the checkpoint of this rank, keyed by FQN.
        tensors: the tensors of this rank.
        ranks: the ranks that save together.
        stages: the pipeline stage of each of `ranks`.
        what: the action, such as "Saving a.ckpt", for error messages.

    Returns:
        tuple[dict[str, Any], list[SavedTensor]]: on rank 0, the merged tree, with tensors on the meta device where only
            other stages have them, and on other ranks an unspecified tree; and what is left of `tensors`.

    Raises:
        CheckpointError: the state of a stage cannot be copied or merged. Raised on all ranks.
    """

    def describe() -> Any:
        if stages.index(stages[ranks.rank]) != ranks.rank:
            return None
        state = {key: value for key, value in tree.items() if is_state_key(key) or key == OTHER_ENTRIES_KEY}
        absent: dict[TreePath, Tensor] = {}
        for tensor in tensors:
            stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            absent |= dict.fromkeys(tensor.paths, stand_in)
        frozen = tree.get(PACKAGE_STATE_KEY, {}).get("frozen", [])
        return absent, frozen, None if ranks.is_rank_0 else host_copy(replace_at(state, absent))

    described = ranks.gather_results(what, describe)
    earlier = {path for found in described[: stages.index(stages[ranks.rank])] if found for path in found[0]}
    left = [replace(tensor, paths=tuple(path for path in tensor.paths if path not in earlier)) for tensor in tensors]

    def merge() -> dict[str, Any]:
        merged: dict[str, Any] = replace_at(tree, {})
        for found in described[1:]:
            if found is not None:
                absent, frozen, state = found
                _add_frozen(merged, frozen)
                present = {path for path, _ in tensors_in(merged)}
                for path in sorted(absent.keys() - present, key=str):
                    if not is_state_key(str(path[0])):  # a shard in the state of a callback
                        _check_names(path)
                        insert(merged, path, absent[path], [0])
                for key, value in state.items():
                    _merge(key, merged.setdefault(key, value), value)
        return merged

    tree = ranks.run_on_all(what, lambda: merge() if ranks.is_rank_0 else tree)
    return tree, [tensor for tensor in left if tensor.paths]


def _check_names(path: TreePath) -> None:
    if not all(isinstance(step, str) for step in path):
        raise CheckpointError(
            f"{name_of(path)} is a shard that only a later stage of the pipeline keeps, in a list or under a number. A "
            "callback must keep such shards in dicts, by names."
        )


def _add_frozen(merged: dict[str, Any], names: list[str]) -> None:
    about = merged.get(PACKAGE_STATE_KEY)
    if about is not None:
        about["frozen"] = list(dict.fromkeys((*about.get("frozen", ()), *names)))


def _merge(key: str, first: Any, second: Any) -> None:
    """Add to `first`, an entry of a checkpoint, what only `second` has."""
    if key in WEIGHT_KEYS:
        versions = {**(versions_in(second) or {}), **(versions_in(first) or {})}
        _add_missing(first, second)
        if versions:
            set_versions(first, versions)
    elif key == OTHER_ENTRIES_KEY:
        _add_by_index(first, second)
    else:
        _add_missing(first["state"], second["state"])
        groups = second["param_groups"]
        for group, other in zip(first["param_groups"], groups, strict=False):
            group["params"] = list(dict.fromkeys((*group["params"], *other["params"])))
        _add_by_index(first["param_groups"], groups)


def _add_missing(first: dict[str, Any], second: Mapping[str, Any]) -> None:
    for key, value in second.items():
        first.setdefault(key, value)


def _add_by_index(first: list[Any], second: Sequence[Mapping[str, Any]]) -> None:
    first.extend({} for _ in range(len(second) - len(first)))
    for one, other in zip(first, second, strict=False):
        _add_missing(one, other)
