"""The weights of a module in a checkpoint: collect this rank's shards, and load weights by name after checking them."""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from copy import copy
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.lazy_tensor import LazyTensor, materialize
from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.tree import is_state_key
from lightning_paral.compat.torch.modules import (
    EXTRA_STATE,
    loading_hooks,
    own_parameters,
    save_own,
    save_submodules_by,
)
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError, ParalError
from lightning_paral.model.engine_attributes import attributes_without_engine, class_without_engine
from lightning_paral.text import list_names

MODELS_KEY = "hugging_face"
"""Key in the state of this package for the descriptions of Hugging Face models."""


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
    return state if getattr(state, "__dict__", None) else dict(state)  # the versions of modules are an attribute


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


def describe_models(module: Module) -> list[dict[str, str]]:
    """Return descriptions of the outermost `PreTrainedModel`s in `module`: `prefix`, `config`, `generation_config`.

    `prefix` is that of the names of its weights, with the dot; the others are the texts of two JSON files.
    `transformers` is not imported here: unless the user has imported it, no such model exists.
    """
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    found: dict[str, dict[str, str]] = {}
    for name, model in module.named_modules():  # parents come first
        prefix = f"{name}." if name else ""
        if not isinstance(model, base) or any(prefix.startswith(outer) for outer in found):
            continue
        found[prefix] = {}
        with suppress(Exception):  # a custom config may raise any error, and that must not make the save fail
            config = json.loads(model.config.to_json_string())
            config["architectures"] = [class_without_engine(type(model)).__name__]
            described = {"prefix": prefix, "config": json.dumps(config)}
            if model.can_generate() and model.generation_config is not None:
                described["generation_config"] = model.generation_config.to_json_string()
            found[prefix] = described
    return [described for described in found.values() if described]


def load_weights(
    module: Module,
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    left_out: Collection[str],
    into: ShardedState,
) -> None:
    """Call `module.load_state_dict(state_dict, strict=strict)`, in which each rank reads what it holds.

    It is called twice, with its hooks and overrides: the first time, names and shapes are compared, the second time,
    values are loaded. After the hooks of each submodule, one of ours takes out what `load_state_dict` itself
    shall not load.

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
    taken, filled = set(left_out), set[int]()

    def compare(part: Module, state: Any, prefix: str, about: Any, strict: Any, *lists: Any) -> None:
        own: dict[str, Any] = {}
        save_own(part, own, prefix)
        for name in [name for name in own if name in state]:
            saved, value = state.pop(name), own[name]
            taken.add(name)
            has_shape = isinstance(value, Tensor) and isinstance(saved, Tensor)
            # The size of a tensor in an extra state may change from save to save.
            if has_shape and not name.endswith(EXTRA_STATE) and tuple(saved.shape) != into.full_shape(value):
                shapes.append(f"{name} (checkpoint {tuple(saved.shape)}, module {into.full_shape(value)})")
                lists[2].append(shapes[-1])

    def load(part: Module, state: Any, prefix: str, *_: Any) -> None:
        for name, parameter in own_parameters(part).items():
            saved = state.get(prefix + name)
            if parameter is None or not isinstance(saved, Tensor):
                continue
            if id(parameter) in filled or into.write_shard(parameter, saved):  # tied parameters have several names
                filled.add(id(parameter))
                del state[prefix + name]
        if prefix + EXTRA_STATE in state:  # which a module may keep
            state[prefix + EXTRA_STATE] = tree_map_only(LazyTensor, materialize, state[prefix + EXTRA_STATE])

    def correct(part: Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in taken]
        missing.extend(keys.missing_keys)
        unexpected.extend(keys.unexpected_keys)

    try:
        with loading_hooks(module, compare, correct):
            module.load_state_dict(copy(state_dict), strict=strict)
    except RuntimeError as error:
        if isinstance(error, ParalError) or not (missing or unexpected or shapes):
            raise
        raise CheckpointError(
            f"The checkpoint's weights do not match {type(module).__name__}. "
            + list_names("Missing in the checkpoint", sorted({*missing}) if strict else [])
            + list_names("Only in the checkpoint", sorted({*unexpected}) if strict else [])
            + list_names("Different shape", shapes)
            + ("To load only the weights whose names match, set `module.strict_loading = False`." if not shapes else "")
        ) from error
    kept = sorted(set(left_out) - state_dict.keys())
    if kept:
        rank_zero_info(
            f"{len(kept)} frozen parameters are not in the checkpoint, and keep the values with which the module was "
            f"built: {', '.join(kept[:4])}{', ...' if len(kept) > 4 else ''}."
        )
    with loading_hooks(module, load, correct), torch.no_grad():
        module.load_state_dict(copy(state_dict), strict=strict)


def without_engine(
    checkpoint: dict[str, Any],
    parameters: Iterable[Parameter],
    full_parameter: Callable[[Parameter], Tensor],
    ranks: RankGroup,
) -> None:
    """Replace modules in `checkpoint` by copies as they would be without an engine: unsharded, without its hooks.

    Networks and losses are among the hyper-parameters after `save_hyperparameters()`, and `on_save_checkpoint` may add
    any module. Under FSDP and ZeRO, the parameters of trained modules are sharded, their class is replaced, and they
    have hooks. *Collective* over `ranks`. Rank 0, which saves them, gets the values.

    Args:
        checkpoint: the checkpoint in Lightning's format. Modules are found in dicts, lists, tuples, and other modules.
        parameters: all parameters that may be sharded, in the same order on all ranks.
        full_parameter: returns the full values of a parameter. *Collective* over `ranks`.
        ranks: the ranks that save together.
    """
    ordered = list(parameters)
    numbers = {id(parameter): number for number, parameter in enumerate(ordered)}
    copies: dict[int, Any] = {}
    copied = {key: _copy(value, numbers, copies) for key, value in checkpoint.items() if not is_state_key(key)}
    found = ranks.gather([number for id_, number in numbers.items() if id_ in copies])
    for number in sorted({number for of_rank in found for number in of_rank}):
        full = full_parameter(ordered[number])
        if ranks.is_rank_0 and id(ordered[number]) in copies:
            copies[id(ordered[number])].data = full.detach().cpu()
    if copies:
        checkpoint.update(copied)


def _copy(value: Any, numbers: Mapping[int, int], copies: dict[int, Any]) -> Any:
    """Return a copy of containers and modules, in which the parameters in `numbers` are empty.

    `copies` gets modules and parameters by the `id` of the original.
    """
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Module):
        cls: Any = class_without_engine(type(value))
        module = copies[id(value)] = cls.__new__(cls)
        attributes = attributes_without_engine(value)
        vars(module).update({name: _copy(each, numbers, copies) for name, each in attributes.items()})
        return module
    if id(value) in numbers:
        copies[id(value)] = Parameter(torch.empty(0), requires_grad=value.requires_grad)
        return copies[id(value)]
    if isinstance(value, dict):
        copied = copy(value)  # preserves the type and attributes
        for key, each in value.items():
            copied[key] = _copy(each, numbers, copies)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copy(each, numbers, copies) for each in value)
    return value
