"""Optimizer state keyed by FQN, so that it does not depend on the order, grouping and sharding of parameters.

After a run that sharded it, each rank keeps its shards on the host as `FlatShard`: see `EndedOptimizers`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.lazy_tensor import materialize, read_into
from lightning_paral.checkpoint.shards import FlatShard, identity, is_sharded, local_shard
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.errors import CheckpointError, ConfigurationError
from lightning_paral.text import list_names

State = dict[str, Any]
"""The result of `Optimizer.state_dict`. Each group has the names of its parameters as `param_names`."""


Names = list[list[str]]
"""The names of the parameters in each group of an optimizer."""

OTHER_ENTRIES_KEY = "lightning_paral.optimizers"
"""Key in `meta.pt` of a sharded checkpoint: for each optimizer, the result of `other_entries`."""

_OPTIMIZER_KEY = re.compile(r"optimizer_(\d+)")
_REMEDY = (
    "Return the same parameters in the same groups from configure_optimizers, or skip the optimizer's state with "
    "CheckpointOptions(restore_optimizer=False)."
)


def param_names(optimizer: Optimizer, module: Module) -> list[list[str]]:
    """Return the names of the parameters in each group. Parameters that are not in `module` get generated names."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [names.get(id(parameter), f"unnamed.{g}.{n}") for n, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter group except its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def state_of(optimizer: Optimizer, names: Sequence[Sequence[str]]) -> State:
    """Return the state of an optimizer over full parameters or DTensors. Tensors are not copied.

    Args:
        optimizer: the optimizer.
        names: the names of the parameters in each group, which are added as `param_names`.
    """
    state = {"state": {}, "param_groups": []} | optimizer.state_dict()  # Lightning's mock optimizer has neither
    for group, group_names in zip(state["param_groups"], names, strict=True):
        group["param_names"] = list(group_names)
    return state


def to_fqn_keys(state: State, names: Sequence[Sequence[str]] | None = None) -> State:
    """Return `state` keyed by FQN instead of int, as in Distributed Checkpoints.

    Args:
        state: the state as `Optimizer.state_dict` returns it, or already keyed by FQN.
        names: the names of the parameters in each group, in order. They are used only for a state without names, which
            another tool saved.

    Raises:
        CheckpointError: the groups of `state` have different sizes than those of `names`, or it has a state that
            belongs to no parameter.
    """
    groups = state.get("param_groups", [])
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        return {"state": dict(state.get("state", {})), "param_groups": [dict(group) for group in groups]}
    if names is None or any("param_names" in group for group in groups):
        names = [group["param_names"] for group in groups]
    sizes, own_sizes = [len(group["params"]) for group in groups], [len(group_names) for group_names in names]
    if sizes != own_sizes:
        raise CheckpointError(
            f"The checkpoint's optimizer has groups of {sizes} parameters without names, but this optimizer has groups "
            f"of {own_sizes}. {_REMEDY}"
        )
    numbers = [number for group in groups for number in group["params"]]
    name_of = dict(zip(numbers, [name for group_names in names for name in group_names], strict=True))
    others = [key for key in state["state"] if key not in name_of]
    if others:
        raise CheckpointError(
            f"The optimizer has a state {others[0]!r} that belongs to no parameter, which checkpoints do not hold. "
            "Keep it in the optimizer's param_groups, or save it in on_save_checkpoint."
        )
    return {
        "state": {name_of[number]: value for number, value in state["state"].items()},
        "param_groups": [
            hyper_parameters(group) | {"params": [name_of[number] for number in group["params"]]} for group in groups
        ],
    }


def to_int_keys(state: State) -> State:
    """Return a state keyed by FQN as `Optimizer.state_dict` returns it: keyed by int, with names in the groups.

    `state` may lack entries, because Distributed Checkpoints drop empty dicts, such as the state of plain SGD.
    """
    groups: list[dict[str, Any]] = []
    number_of: dict[str, int] = {}
    for group in state.get("param_groups", []):
        numbers = [number_of.setdefault(name, len(number_of)) for name in group["params"]]
        groups.append(hyper_parameters(group) | {"params": numbers, "param_names": list(group["params"])})
    return {
        "state": {number_of[name]: value for name, value in state.get("state", {}).items() if name in number_of},
        "param_groups": groups,
    }


def other_entries(state: State) -> dict[str, Any]:
    """Return the entries of `state` other than `state` and `param_groups`, such as averages of weights."""
    return {key: value for key, value in state.items() if key not in ("state", "param_groups")}


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


class SavedOptimizer:
    """The state of one optimizer in a checkpoint, keyed by FQN.

    Args:
        state: the state in the checkpoint, keyed by int or FQN.
        names: the names of the parameters in each group of the optimizer that loads the state.

    Raises:
        CheckpointError: the state belongs to an optimizer over different parameters.
    """

    def __init__(self, state: State, names: Sequence[Sequence[str]]) -> None:
        named = to_fqn_keys(state, names)
        self.state: dict[str, dict[str, Any]] = named["state"]
        self._group_of = {name: group for group in named["param_groups"] for name in group["params"]}
        wanted = {name for group_names in names for name in group_names}
        missing, unexpected = sorted(wanted - self._group_of.keys()), sorted(self._group_of.keys() - wanted)
        if missing or unexpected:
            raise CheckpointError(
                "The checkpoint's optimizer has different parameters. "
                + list_names("Not in the checkpoint", missing)
                + list_names("Only in the checkpoint", unexpected)
                + _REMEDY
            )

    def hyper_parameters(self, group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Return the hyper-parameters of `group`, updated with those in the checkpoint.

        Args:
            group: a parameter group of the optimizer.
            names: the names of its parameters.

        Raises:
            CheckpointError: in the checkpoint, the parameters of this group have different hyper-parameters.
        """
        saved: list[dict[str, Any]] = []
        for name in names:
            found = tree_map_only(Tensor, _as_number, hyper_parameters(self._group_of[name]))
            if found not in saved:
                saved.append(found)
        if len(saved) > 1:
            raise CheckpointError(
                "Parameters in the same group of the optimizer have different hyper-parameters in the checkpoint: "
                f"{saved[0]} and {saved[1]}. {_REMEDY}"
            )
        return hyper_parameters(group) | (saved[0] if saved else {})


def load_state(optimizer: Optimizer, names: Sequence[Sequence[str]], saved: State) -> None:
    """Load a saved state into an optimizer over full parameters or DTensors. Each rank reads only its shards.

    Args:
        optimizer: the optimizer.
        names: the names of the parameters in each of its groups.
        saved: the state in the checkpoint, keyed by int or FQN.

    Raises:
        CheckpointError: the state does not match the optimizer.
    """
    checkpoint = SavedOptimizer(saved, names)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        start = sum(len(each["params"]) for each in groups)
        numbers = range(start, start + len(group_names))
        groups.append(checkpoint.hyper_parameters(group, group_names) | {"params": list(numbers)})
        for number, name, parameter in zip(numbers, group_names, group["params"], strict=True):
            if name in checkpoint.state and not isinstance(parameter, FlatShard):  # that of another stage
                found = checkpoint.state[name]
                state[number] = {key: _restore_value(key, value, parameter) for key, value in found.items()}
    others = tree_map_only(Tensor, _copy, other_entries(saved))
    optimizer.load_state_dict(others | {"state": state, "param_groups": groups})


def _restore_value(key: str, value: Any, parameter: Parameter) -> Any:
    if not isinstance(value, Tensor) or key == "step" or value.shape != parameter.shape:
        return tree_map_only(Tensor, _copy, value)
    target = torch.empty_like(parameter.detach(), dtype=value.dtype)  # the optimizer chooses which to convert
    read_into(value, target)
    return target


def _copy(value: Tensor) -> Tensor:
    return materialize(value).clone()


def _as_number(value: Tensor) -> Any:
    return materialize(value).item() if value.numel() == 1 else value


class EndedOptimizers:
    """Prepares optimizers for the time after a run, and keeps the names of their parameters.

    The names are kept because a later evaluation may shard the module again and replace its parameters. They can then
    no longer be looked up in the module.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Optimizer, Names] = WeakKeyDictionary()
        self._lost: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()

    def keep(self, optimizer: Optimizer, module: Module, state: State | None, parameters: Mapping[Any, Any]) -> None:
        """Give `optimizer` the parameters that the module has after the run, and this rank's shards of its state.

        Args:
            optimizer: the user's optimizer.
            module: the module after the run.
            state: the state with int keys, as `Optimizer.state_dict` returns it; `None` keeps the current state of
                `optimizer`.
            parameters: maps parameters of the optimizer to those of the module; those that are the same may be absent.
        """
        local = dict(optimizer.state)
        if state is not None:
            in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            local = {in_order[number]: values for number, values in state["state"].items()}
        for group in optimizer.param_groups:
            group["params"] = [parameters.get(parameter, parameter) for parameter in group["params"]]
        optimizer.state.clear()
        for parameter, values in local.items():
            optimizer.state[parameters.get(parameter, parameter)] = tree_map_only(Tensor, _on_host, values)
        self._names[optimizer] = param_names(optimizer, module)

    def lose(self, optimizer: Optimizer, reason: str) -> None:
        """Record that the state of `optimizer` was lost at the end of the run, and why."""
        self._lost[optimizer] = reason

    def why_lost(self, optimizer: Optimizer) -> str | None:
        """Return why the state of `optimizer` was lost at the end of a run; `None` if it was not."""
        return self._lost.get(optimizer)

    def names(self, optimizer: Optimizer, module: Module) -> Names:
        """Return the names of the parameters of `optimizer`, one list per group.

        Raises:
            ConfigurationError: the state of the optimizer was lost at the end of the run.
        """
        if optimizer in self._lost:
            raise ConfigurationError(
                f"The optimizer's state can be saved only during trainer.fit: {self._lost[optimizer]}. Use "
                "ModelCheckpoint, or trainer.save_checkpoint(path, weights_only=True)."
            )
        return self._names.get(optimizer) or param_names(optimizer, module)


def _on_host(value: Tensor) -> Tensor:
    """Return this rank's elements of `value` on the host, as a plain tensor or a `FlatShard`."""
    if not is_sharded(value):
        return value.detach().cpu()
    shard = local_shard(value)  # of a DTensor, only the first replica has elements, which a gather adds up
    local = shard.values().detach().to("cpu", value.dtype)
    if local.numel() == value.numel() and dist.is_initialized() and dist.get_world_size() == 1:
        return local.view(value.shape)
    if isinstance(value, FlatShard):
        start, chunk = value.start, value.local_chunk
    else:
        start, chunk = 0, next(iter(shard.chunks), None)
    values = partial(identity, local)
    return FlatShard(value.shape, value.dtype, start, local.numel(), values, local_chunk=chunk)
