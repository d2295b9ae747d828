"""The weights of a module in a checkpoint: collect this rank's shards, and load weights by name after checking them."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Module, Parameter
from torchmetrics import Metric

from lightning_paral.checkpoint.hugging_face import KEY as MODELS_KEY
from lightning_paral.checkpoint.hugging_face import describe_models
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, materialize
from lightning_paral.checkpoint.optimizer_state import list_names
from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.compat.torch.modules import (
    EXTRA_STATE,
    load_hooks,
    load_submodules_by,
    own_children,
    own_parameters,
    save_own,
    save_submodules_by,
    set_load_hooks,
    versions_in,
)
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError, ParalError

PACKAGE_STATE_KEY = "lightning_paral"
"""Key in a checkpoint for the state that only this package reads: the names of frozen parameters that were not saved,
random states, and descriptions of Hugging Face models."""


def sharded_state_dict(module: Module, shard: Callable[[Parameter], Tensor], save_frozen: bool) -> dict[str, Any]:
    """Return `module.state_dict()` with `shard(parameter)` instead of each parameter.

    Hooks and overrides of `state_dict` see the shards: they may add, rename and delete entries, and may apply to
    tensors the operations that shards support.

    Args:
        module: the unwrapped LightningModule.
        shard: returns this rank's shard of a parameter; called once for each parameter, even if it has several names.
        save_frozen: whether to include frozen parameters.

    Raises:
        CheckpointError: `module.state_dict()` did not return a dict with string keys.
    """
    shards: dict[int, Tensor] = {}

    def save(part: Module, own: Callable[..., Any], destination: Any, prefix: str, _: Any) -> None:
        before = set(destination)
        own(destination, prefix, True)
        for name in [name for name in destination if name not in before]:
            value = destination[name]
            if isinstance(value, Parameter):
                if id(value) not in shards:
                    shards[id(value)] = shard(value)
                destination[name] = shards[id(value)]
            elif isinstance(value, Tensor):
                destination[name] = value.detach()

    with save_submodules_by(module, save):
        state = module.state_dict()
    if not isinstance(state, Mapping) or any(not isinstance(name, str) for name in state):
        raise CheckpointError(
            f"{type(module).__name__}.state_dict() returned a {type(state).__name__}, but a checkpoint requires a dict "
            "of tensors by name. Return one."
        )
    left_out = [] if save_frozen else [p for p in module.parameters() if not p.requires_grad and id(p) in shards]
    frozen = {id(shards[id(parameter)]) for parameter in left_out}
    for name in [name for name, value in state.items() if id(value) in frozen]:
        del state[name]
    return dict(state) if versions_in(state) is None else state


def replicated_storages(module: Module) -> set[int]:
    """Return the addresses of the storages of parameters that are not sharded."""
    full = [parameter for parameter in module.parameters() if parameter.numel() and not is_sharded(parameter)]
    return {parameter.untyped_storage().data_ptr() for parameter in full}


def package_state(module: Module, save_frozen: bool, ranks: RankGroup, random_states: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that only this package reads. *Collective* over `ranks`.

    Args:
        module: the unwrapped LightningModule.
        save_frozen: whether the checkpoint includes frozen parameters.
        ranks: the ranks that save together.
        random_states: the random states of this rank.
    """
    frozen = [
        name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad
    ]
    models = describe_models(module)
    about = {"frozen": [] if save_frozen else frozen, "random_states": ranks.gather(random_states)}
    return about | ({MODELS_KEY: models} if models else {})


def load_weights(
    module: Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    left_out: Collection[str],
    into: ShardedState,
) -> None:
    """Call `module.load_state_dict(state_dict, strict=strict)`, in which each rank reads only its shards.

    It is called twice, with its hooks and overrides: the first time, names and shapes are compared, the second time,
    values are loaded.

    Args:
        module: the unwrapped LightningModule.
        state_dict: the saved entries: full tensors or `LazyTensor`, and extra states.
        strict: whether missing and unexpected names are errors.
        left_out: the names of frozen parameters that were not saved. They keep their values.
        into: the state of `module`.

    Raises:
        CheckpointError: names or shapes do not match. The module is unchanged.
    """
    missing: list[str] = []
    unexpected: list[str] = []
    shapes: list[str] = []
    filled: set[int] = set()

    def compare(part: Module, own: Callable[..., Any], state: Any, prefix: str, about: Any, *rest: Any) -> None:
        _run_hooks(part, state, prefix, about, *rest)
        expected: dict[str, Any] = {}
        save_own(part, expected, prefix)
        absent = [name for name in expected if name not in state and name not in left_out]
        known = tuple(f"{prefix}{name}." for name in own_children(part))
        unknown = [
            name
            for name in state
            if name.startswith(prefix) and not name.startswith(known) and name not in expected
            if not isinstance(part, Metric)  # expects entries of its own
        ]
        different = [
            f"{name} (checkpoint {tuple(state[name].shape)}, module {into.full_shape(value)})"
            for name, value in expected.items()
            if isinstance(value, Tensor) and isinstance(state.get(name), Tensor)
            if not name.endswith(EXTRA_STATE)  # the size of a tensor in it may change from save to save
            if tuple(state[name].shape) != into.full_shape(value)
        ]
        for found, ours, theirs in zip(
            (absent, unknown, different), (missing, unexpected, shapes), rest[1:], strict=True
        ):
            ours += found
            theirs += found

    def load(part: Module, own: Callable[..., Any], state: Any, prefix: str, about: Any, *rest: Any) -> None:
        _run_hooks(part, state, prefix, about, *rest)
        done = set()
        for name, parameter in own_parameters(part).items():
            saved = state.get(prefix + name)
            if parameter is None or not isinstance(saved, Tensor):
                continue
            if id(parameter) in filled or into.write_shard(parameter, saved):  # tied parameters have several names
                filled.add(id(parameter))
                done.add(prefix + name)
        # A module may keep its extra state.
        entries = {
            name: tree_map_only(LazyTensor, materialize, value) if name.endswith(EXTRA_STATE) else value
            for name, value in state.items()
            if name not in done
        }
        with _without_hooks(part):
            own(entries, prefix, about, *rest)
        rest[1][:] = [name for name in rest[1] if name not in done and name not in left_out]

    try:
        with load_submodules_by(module, compare):
            module.load_state_dict(copy(state_dict), strict=strict)
    except RuntimeError as error:
        if isinstance(error, ParalError) or not (missing or unexpected or shapes):
            raise
        raise CheckpointError(
            f"The checkpoint's weights do not match {type(module).__name__}. "
            + list_names("Missing in the checkpoint", sorted(missing) if strict else [])
            + list_names("Only in the checkpoint", sorted(unexpected) if strict else [])
            + list_names("Different shape", shapes)
            + ("To load only the weights whose names match, set `module.strict_loading = False`." if not shapes else "")
        ) from error
    kept = sorted(set(left_out) - state_dict.keys())
    if kept:
        rank_zero_info(
            f"{len(kept)} frozen parameters are not in the checkpoint, and keep the values with which the module was "
            f"built: {', '.join(kept[:4])}{', ...' if len(kept) > 4 else ''}."
        )
    with load_submodules_by(module, load), torch.no_grad():
        module.load_state_dict(copy(state_dict), strict=strict)


def _run_hooks(part: Module, state: Any, *about: Any) -> None:
    """Run the load-state-dict pre-hooks of `part`, which convert the entries that its older versions saved."""
    for hook in load_hooks(part).values():
        hook(state, *about)


@contextmanager
def _without_hooks(part: Module) -> Iterator[None]:
    hooks = load_hooks(part)
    set_load_hooks(part, OrderedDict())
    try:
        yield
    finally:
        set_load_hooks(part, hooks)
