"""The weights of a module in a checkpoint: collect this rank's shards, and load weights by name after checking them."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.formats.hugging_face import KEY as MODELS_KEY
from lightning_paral.checkpoint.formats.hugging_face import describe_models
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, materialize
from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.state.custom_state_dict import (
    call_load_state_dict,
    call_state_dict,
    overrides_load_state_dict,
    overrides_state_dict,
)
from lightning_paral.checkpoint.state.load_hooks import (
    has_load_hooks,
    names_to_load,
    run_load_hooks,
    without_load_hooks,
)
from lightning_paral.checkpoint.state.optimizer import list_names
from lightning_paral.compat.torch.modules import EXTRA_STATE, set_versions, versions_in
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError

PACKAGE_STATE_KEY = "lightning_paral"
"""Key in a checkpoint for the state that only this package reads: the names of frozen parameters that were not saved,
random states, and descriptions of Hugging Face models."""


def sharded_state_dict(module: Module, shard: Callable[[Parameter], Tensor], save_frozen: bool) -> dict[str, Any]:
    """Return `module.state_dict()` with `shard(parameter)` instead of each parameter.

    Args:
        module: the unwrapped LightningModule.
        shard: returns this rank's shard of a parameter; called once for each parameter, even if it has several names.
        save_frozen: whether to include frozen parameters.
    """
    by_parameter: dict[int, Tensor] = {}

    def once(parameter: Parameter) -> Tensor:
        if id(parameter) not in by_parameter:
            by_parameter[id(parameter)] = shard(parameter)
        return by_parameter[id(parameter)]

    if overrides_state_dict(module):
        custom = call_state_dict(module, once)
        left_out = [p for p in module.parameters() if not (p.requires_grad or save_frozen) and id(p) in by_parameter]
        frozen = {id(by_parameter[id(parameter)]) for parameter in left_out}
        for name in [name for name, value in custom.items() if id(value) in frozen]:
            del custom[name]
        return custom
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in list(state.items()):
        if not isinstance(value, Parameter):
            state[name] = value.detach() if isinstance(value, Tensor) else value
        elif value.requires_grad or save_frozen:
            state[name] = once(value)
        else:
            del state[name]
    return state


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
    """Load `state_dict` into `module`. Each rank reads only its shards.

    Args:
        module: the unwrapped LightningModule.
        state_dict: the saved entries: full tensors or `LazyTensor`, and extra states.
        strict: whether missing and unexpected names are errors.
        left_out: the names of frozen parameters that were not saved. They keep their values.
        into: the state of `module`.

    Raises:
        CheckpointError: names or shapes do not match. The module is unchanged.
        RuntimeError: names or shapes do not match, and `module` overrides `load_state_dict`.
    """
    if overrides_load_state_dict(module):
        call_load_state_dict(module, state_dict, strict=strict, left_out=left_out, into=into)
        return
    has_hooks = has_load_hooks(module)
    if has_hooks:
        state_dict = run_load_hooks(module, state_dict, strict)
    expected = names_to_load(module) if has_hooks else module.state_dict(keep_vars=True)
    missing = sorted(expected.keys() - state_dict.keys() - set(left_out))
    unexpected = sorted(state_dict.keys() - expected.keys())
    shapes = [
        f"{name} (checkpoint {tuple(saved.shape)}, module {into.full_shape(expected[name])})"
        for name, saved in state_dict.items()
        if not _is_extra_state(name)  # the size of a tensor in it may change from save to save
        and isinstance(saved, Tensor)
        and isinstance(expected.get(name), Tensor)
        and saved.shape != into.full_shape(expected[name])
    ]
    if shapes or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"The checkpoint's weights do not match {type(module).__name__}. "
            + list_names("Missing in the checkpoint", missing if strict else [])
            + list_names("Only in the checkpoint", unexpected if strict else [])
            + list_names("Different shape", shapes)
            + ("To load only the weights whose names match, set `module.strict_loading = False`." if not shapes else "")
        )
    kept = sorted(set(left_out) & expected.keys() - state_dict.keys())
    if kept:
        rank_zero_info(
            f"{len(kept)} frozen parameters are not in the checkpoint, and keep the values with which the module was "
            f"built: {', '.join(kept[:4])}{', ...' if len(kept) > 4 else ''}."
        )
    rest: OrderedDict[str, Any] = OrderedDict()  # what `module.load_state_dict` has to load
    filled = set()
    with torch.no_grad():
        for name, saved in state_dict.items():
            parameter = expected.get(name)
            if _is_extra_state(name):
                rest[name] = tree_map_only(LazyTensor, materialize, saved)  # a module may keep it
            elif not isinstance(parameter, Parameter) or not isinstance(saved, Tensor):
                rest[name] = saved
            elif id(parameter) not in filled:  # tied parameters have several names
                if into.write_shard(parameter, saved):
                    filled.add(id(parameter))
                else:
                    rest[name] = saved
    if (versions := versions_in(state_dict)) is not None:
        set_versions(rest, versions)
    with without_load_hooks(module) if has_hooks else nullcontext():
        module.load_state_dict(rest, strict=False)


def _is_extra_state(name: str) -> bool:
    return name.endswith(EXTRA_STATE)
