"""Call a `state_dict` or `load_state_dict` that a module overrides, with shards instead of parameters."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torchmetrics import Metric

from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.state.load_hooks import run_own_load_hooks, without_load_hooks
from lightning_paral.compat.torch.modules import load_submodules_by, own_parameters, save_submodules_by, versions_in
from lightning_paral.errors import CheckpointError


def overrides_state_dict(module: Module) -> bool:
    """Return whether `module` or a submodule overrides `state_dict`."""
    return any(
        type(part).state_dict is not Module.state_dict and not isinstance(part, Metric) for part in module.modules()
    )


def overrides_load_state_dict(module: Module) -> bool:
    """Return whether `module` overrides `load_state_dict`. Overrides in submodules do not count: torch ignores them."""
    return type(module).load_state_dict is not Module.load_state_dict


def call_state_dict(module: Module, shard: Callable[[Parameter], Tensor]) -> dict[str, Any]:
    """Return `module.state_dict()` with `shard(parameter)` instead of each parameter.

    Overrides of `state_dict` may add, rename and delete entries, and may apply to tensors the operations that shards
    support.

    Raises:
        CheckpointError: `module.state_dict()` did not return a dict with string keys.
    """

    def save(part: Module, own: Callable[..., Any], destination: Any, prefix: str, _: Any) -> None:
        before = set(destination)
        own(destination, prefix, True)
        for name in destination.keys() - before:
            value = destination[name]
            if isinstance(value, Parameter):
                destination[name] = shard(value)
            elif isinstance(value, Tensor):
                destination[name] = value.detach()

    with save_submodules_by(module, save):
        state = module.state_dict()
    if not isinstance(state, Mapping) or any(not isinstance(name, str) for name in state):
        raise CheckpointError(
            f"{type(module).__name__}.state_dict() returned a {type(state).__name__}, but a checkpoint requires a dict "
            "of tensors by name. Return one."
        )
    return dict(state) if versions_in(state) is None else state


def call_load_state_dict(
    module: Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    left_out: Collection[str],
    into: ShardedState,
) -> None:
    """Call `module.load_state_dict(state_dict, strict=strict)`. Parameters that `into` can load are loaded by it.

    Args:
        module: a module that overrides `load_state_dict`.
        state_dict: the saved entries.
        strict: as in `Module.load_state_dict`.
        left_out: names that may be missing even if `strict`.
        into: the state of `module`.

    Raises:
        RuntimeError: names or shapes do not match, as for `Module.load_state_dict`.
    """
    filled = set()

    def load(part: Module, own: Callable[..., Any], state: Any, prefix: str, about: Any, *rest: Any) -> None:
        run_own_load_hooks(part, state, prefix, about, *rest)
        missing, errors = rest[1], rest[3]
        done = set()
        for name, parameter in own_parameters(part).items():
            saved = state.get(prefix + name)
            if parameter is None or not isinstance(saved, Tensor):
                continue
            shape = into.full_shape(parameter)
            if tuple(saved.shape) != shape:
                errors.append(f"{prefix + name} has shape {tuple(saved.shape)}, but {shape} in the module.")
                done.add(prefix + name)
            elif id(parameter) in filled or into.write_shard(parameter, saved):
                filled.add(id(parameter))
                done.add(prefix + name)
        with without_load_hooks(part, recurse=False):
            own({name: value for name, value in state.items() if name not in done}, prefix, about, *rest)
        missing[:] = [name for name in missing if name not in done and name not in left_out]

    with load_submodules_by(module, load), torch.no_grad():
        module.load_state_dict(state_dict, strict=strict)
