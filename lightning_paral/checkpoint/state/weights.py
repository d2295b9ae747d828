"""Loading weights into a module: by name, with all that does not fit listed before any of it changes."""

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
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, read_whole
from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.state.custom_state_dict import (
    load_its_own,
    loads_its_own,
    own_state_dict,
    saves_its_own,
)
from lightning_paral.checkpoint.state.load_hooks import (
    has_load_hooks,
    names_to_load,
    run_load_hooks,
    without_load_hooks,
)
from lightning_paral.checkpoint.state.optimizer import listing
from lightning_paral.compat.torch.pytree import tree_map_only
from lightning_paral.compat.torch.state_dicts import EXTRA_STATE, set_versions, versions_in
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError

PACKAGE_STATE_KEY = "lightning_paral"
"""Where a checkpoint holds what only this package needs: frozen parameters left out, random states, and what
Hugging Face models in the module are."""


def sharded_state_dict(module: Module, held: Callable[[Parameter], Tensor], save_frozen: bool) -> dict[str, Any]:
    """Return what `module.state_dict()` does, with `held(parameter)` for each parameter."""
    by_parameter: dict[int, Tensor] = {}

    def once(parameter: Parameter) -> Tensor:
        if id(parameter) not in by_parameter:
            by_parameter[id(parameter)] = held(parameter)
        return by_parameter[id(parameter)]

    if saves_its_own(module):
        own = own_state_dict(module, once)
        left_out = [p for p in module.parameters() if not (p.requires_grad or save_frozen) and id(p) in by_parameter]
        frozen = {id(by_parameter[id(parameter)]) for parameter in left_out}
        for name in [name for name, value in own.items() if id(value) in frozen]:
            del own[name]
        return own
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
    """Return the addresses of the storages of parameters that this rank holds whole."""
    whole = [parameter for parameter in module.parameters() if parameter.numel() and not is_sharded(parameter)]
    return {parameter.untyped_storage().data_ptr() for parameter in whole}


def package_state(module: Module, save_frozen: bool, ranks: RankGroup, random_states: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that only this package reads. *Collective*.

    Args:
        module: the unwrapped LightningModule.
        save_frozen: whether the checkpoint includes frozen parameters.
        ranks: the ranks that save together.
        random_states: this rank's random states, current or from the end of the fit.
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
    """Give `module` the weights in `state_dict`, of which only what this rank holds is read.

    Args:
        module: the unwrapped LightningModule.
        state_dict: tensors of full shape by name, and what else `Module.state_dict` returns.
        strict: whether missing and unexpected names are errors.
        left_out: names that were not saved because they were frozen; the module's own values stay.
        into: the state of `module`.

    Raises:
        CheckpointError: names or shapes do not fit; nothing was changed then.
    """
    if loads_its_own(module):
        load_its_own(module, state_dict, strict=strict, left_out=left_out, into=into)
        return
    hooked = has_load_hooks(module)
    if hooked:
        state_dict = run_load_hooks(module, state_dict, strict)
    own = names_to_load(module) if hooked else module.state_dict(keep_vars=True)
    missing = sorted(own.keys() - state_dict.keys() - set(left_out))
    unexpected = sorted(state_dict.keys() - own.keys())
    shapes = [
        f"{name} (checkpoint {tuple(saved.shape)}, module {into.full_shape(own[name])})"
        for name, saved in state_dict.items()
        if not _is_extra_state(name)  # of which a module may have another size every time
        and isinstance(saved, Tensor)
        and isinstance(own.get(name), Tensor)
        and saved.shape != into.full_shape(own[name])
    ]
    if shapes or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"The checkpoint's weights do not fit {type(module).__name__}. "
            + listing("Missing in the checkpoint", missing if strict else [])
            + listing("Only in the checkpoint", unexpected if strict else [])
            + listing("Of another shape", shapes)
            + ("`strict_loading = False` in the module loads what fits by name." if not shapes else "")
        )
    kept = sorted(set(left_out) & own.keys() - state_dict.keys())
    if kept:
        rank_zero_info(
            f"{len(kept)} frozen parameters are not in the checkpoint; those of the module as it was built stay: "
            f"{', '.join(kept[:4])}{', ...' if len(kept) > 4 else ''}."
        )
    rest: OrderedDict[str, Any] = OrderedDict()
    filled = set()
    with torch.no_grad():
        for name, saved in state_dict.items():
            parameter = own.get(name)
            if _is_extra_state(name):
                rest[name] = tree_map_only(LazyTensor, read_whole, saved)  # modules keep what they are given
            elif not isinstance(parameter, Parameter) or not isinstance(saved, Tensor):
                rest[name] = saved
            elif id(parameter) not in filled:  # tied parameters have several names
                if into.write_shard(parameter, saved):
                    filled.add(id(parameter))
                else:
                    rest[name] = saved
    if (versions := versions_in(state_dict)) is not None:
        set_versions(rest, versions)
    with without_load_hooks(module) if hooked else nullcontext():
        module.load_state_dict(rest, strict=False)


def _is_extra_state(name: str) -> bool:
    return name.endswith(EXTRA_STATE)
