"""Merge the weights and optimizer states of several pipeline stages on rank 0, without their tensors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import zip_longest
from typing import Any

import torch

from lightning_paral.checkpoint.io.staging import copy_to_host
from lightning_paral.checkpoint.optimizer_state import OTHER_ENTRIES_KEY, to_int_keys
from lightning_paral.checkpoint.save_plan import WriteItem
from lightning_paral.checkpoint.tree import WEIGHT_KEYS, TreePath, insert, is_state_key, replace_at, tensors_in
from lightning_paral.checkpoint.weights import PACKAGE_STATE_KEY
from lightning_paral.compat.torch.modules import set_versions, versions_in
from lightning_paral.distributed.exchange import RankGroup

_PLACEHOLDER = torch.empty(0, device="meta")
"""Stands for a tensor that only other ranks have."""


def merge_stages(
    tree: dict[str, Any], items: Iterable[WriteItem], ranks: RankGroup, stages: Sequence[int], what: str
) -> dict[str, Any]:
    """Return rank 0's `tree` with the weights and optimizer states of all stages. *Collective*.

    If several stages have the same entry, that of rank 0 is used, or that of the first such stage if rank 0 has none.
    Parameter groups are merged by index: a group has the parameters of all stages, and the hyper-parameters of the
    first stage that has this group. The names of frozen parameters that were not saved are collected from all stages.

    Args:
        tree: the checkpoint of this rank, with an entry `optimizer_0`, ... for each optimizer, keyed by FQN. It is not
            changed.
        items: the tensors that are saved.
        ranks: the ranks that save together.
        stages: the pipeline stage of each of `ranks`.
        what: the action, such as "Saving a.ckpt", for error messages.

    Returns:
        dict[str, Any]: on rank 0, the merged tree, with a placeholder at each path of `items` whose tensor only other
            ranks have; on other ranks, an empty dict.

    Raises:
        CheckpointError: the trees cannot be copied or merged. Raised on all ranks.
    """
    paths = [path for item in items for path in (item.path, *item.aliases)]
    local = ranks.run_on_all(what, lambda: _without_tensors(tree, paths))
    merged = dict(tree)

    def merge(other: dict[str, Any]) -> None:
        for key, state in other.items():
            merged[key] = _merge_entries(key, merged[key], state) if key in merged else state

    for stage in sorted(set(stages) - {stages[0]}):
        other = ranks.broadcast(local, stages.index(stage))
        ranks.run_on_rank_0(what, lambda other=other: merge(other))  # type: ignore[misc]
    return ranks.run_on_all(what, lambda: _with_placeholders(merged, paths) if ranks.is_rank_0 else {})


def _without_tensors(tree: Mapping[str, Any], paths: Iterable[TreePath]) -> dict[str, Any]:
    """Return a copy of the entries of `tree` that are merged, with placeholders at `paths`."""
    state = {key: value for key, value in tree.items() if is_state_key(key) or key == OTHER_ENTRIES_KEY}
    if PACKAGE_STATE_KEY in tree:
        state[PACKAGE_STATE_KEY] = {"frozen": tree[PACKAGE_STATE_KEY].get("frozen", [])}
    stripped: dict[str, Any] = copy_to_host(replace_at(state, dict.fromkeys(paths, _PLACEHOLDER)))
    return stripped


def _with_placeholders(tree: dict[str, Any], paths: Sequence[TreePath]) -> dict[str, Any]:
    """Return a copy of the merged `tree` with placeholders at those of `paths` that have no tensor."""
    present = {path for path, _ in tensors_in(tree)}
    copied: dict[str, Any] = replace_at(tree, {})
    for path in paths:
        if path not in present:
            insert(copied, path, _PLACEHOLDER, [len(paths)])
    if OTHER_ENTRIES_KEY in copied:
        num_optimizers = sum(_is_optimizer_key(key) for key in copied)
        copied[OTHER_ENTRIES_KEY] += [{} for _ in range(num_optimizers - len(copied[OTHER_ENTRIES_KEY]))]
    return copied


def _is_optimizer_key(key: str) -> bool:
    return re.fullmatch(r"optimizer_\d+", key) is not None


def _merge_entries(key: str, first: Any, second: Any) -> Any:
    """Return the merged value of `key`. Where both stages have an entry, the value is that of `first`."""
    if key in WEIGHT_KEYS:
        weights = _with_missing(first, second)
        if (versions := versions_in(second)) is not None:
            set_versions(weights, {**versions, **(versions_in(first) or {})})
        return weights
    if key == PACKAGE_STATE_KEY:
        return {**first, "frozen": list(dict.fromkeys((*first.get("frozen", ()), *second["frozen"])))}
    if key == OTHER_ENTRIES_KEY:
        return [_with_missing(*pair) for pair in _pair(first, second)]
    groups = _pair(first["param_groups"], second["param_groups"])
    return {
        "state": _with_missing(first["state"], second["state"]),
        "param_groups": [_merge_groups(*pair) for pair in groups],
    }


def _pair(first: list[Any], second: list[Any]) -> list[tuple[Any, Any]]:
    """Return the elements of two lists in pairs, with an empty dict where the shorter list has none."""
    empty: dict[str, Any] = {}
    return list(zip_longest(first, second, fillvalue=empty))


def _with_missing(first: Any, second: Mapping[str, Any]) -> Any:
    """Return a copy of the mapping `first`, of the same type, with the entries that only `second` has.

    They follow the entry that they follow in `second`, so that stages whose entries are in a common order keep it.
    """
    merged = copy(first)
    if second.keys() <= first.keys():
        return merged
    merged.clear()
    followers: dict[Any, list[Any]] = {}
    before = None
    for key in second:
        if key not in first:
            followers.setdefault(before, []).append(key)
        else:
            before = key
    merged.update({key: second[key] for key in followers.get(None, ())})
    for key, value in first.items():
        merged[key] = value
        merged.update({follower: second[follower] for follower in followers.get(key, ())})
    return merged


def _merge_groups(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys((*first.get("params", ()), *second.get("params", ())))
    return {**second, **first, "params": list(names)}


def restore_int_keys(tree: dict[str, Any], items: Iterable[WriteItem]) -> dict[str, Any]:
    """Return `tree` with optimizer states in Lightning's format, and change the paths of `items` to match.

    Args:
        tree: a checkpoint with an entry `optimizer_0`, ... for each optimizer, keyed by FQN.
        items: the tensors that are saved; changed in place.
    """
    restored = {key: value for key, value in tree.items() if not _is_optimizer_key(key) and key != OTHER_ENTRIES_KEY}
    by_fqn = [tree[f"optimizer_{number}"] for number in range(sum(map(_is_optimizer_key, tree)))]
    others = tree.get(OTHER_ENTRIES_KEY) or [{} for _ in by_fqn]
    if by_fqn:
        restored["optimizer_states"] = [other | to_int_keys(state) for other, state in zip(others, by_fqn, strict=True)]
    numbers: list[dict[Any, int]] = [{} for _ in by_fqn]
    for number_of, state in zip(numbers, by_fqn, strict=True):
        for name in (name for group in state["param_groups"] for name in group["params"]):
            number_of.setdefault(name, len(number_of))

    def with_int_keys(path: TreePath) -> TreePath:
        key, *rest = path
        if key == OTHER_ENTRIES_KEY:
            return ("optimizer_states", *rest)
        if not _is_optimizer_key(str(key)):
            return path
        number = int(str(key).removeprefix("optimizer_"))
        if rest[0] == "state":
            rest[1] = numbers[number][rest[1]]
        return ("optimizer_states", number, *rest)

    for item in items:
        item.path, item.aliases = with_int_keys(item.path), [with_int_keys(path) for path in item.aliases]
    return restored
