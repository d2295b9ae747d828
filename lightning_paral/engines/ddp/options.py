"""Check the options of DDP, and explain its error about unused parameters."""

import inspect
import re
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_paral.errors import ConfigurationError
from lightning_paral.option_names import explain_unknown_option, register_options
from lightning_paral.option_types import check_type
from lightning_paral.options import RANK_DEFAULTS, RankOptions


class DDPOptions(RankOptions, total=False):
    """Keywords of `ParalDDPStrategy`: those of `RankOptions`, and those that it passes to `DistributedDataParallel`."""

    output_device: int | torch.device | None
    dim: int
    broadcast_buffers: bool | None
    init_sync: bool
    bucket_cap_mb: float | None
    bucket_cap_mb_list: list[float] | None
    find_unused_parameters: bool
    check_reduction: bool
    static_graph: bool
    delay_all_reduce_named_params: Any
    param_to_hook_all_reduce: Any
    mixed_precision: Any
    device_mesh: Any
    process_group: Any
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DistributedDataParallel.__init__).parameters.items()
    if name not in ("self", "module", "device_ids")
}
_DDP_OPTIONS = set(_DEFAULTS)
_TYPES: dict[str, Any] = {
    **{name: bool for name, default in _DEFAULTS.items() if isinstance(default, bool)},
    "bucket_cap_mb": float | None,
    "bucket_cap_mb_list": list[float] | None,
    "broadcast_buffers": bool | None,
    "dim": int,
    "forward_sync_buffers": bool | None,
}
register_options("ParalDDPStrategy", _DDP_OPTIONS)
_INDICES_WITHOUT_GRADIENT = re.compile(r"did not receive grad for rank \d+:((?: \d+)+)")


def check_choice(option: str, given: object, choices: tuple[object, ...]) -> None:
    """Raise a `ConfigurationError` if `given` is not one of the choices."""
    if given not in choices:
        raise ConfigurationError(f"{option}={given!r} is not known. Choose from: {', '.join(map(repr, choices))}.")


def check_hook(hook: object, all_reduce: str, wire_dtype: str | None) -> None:
    """Raise a `ConfigurationError` if both a hook and an option for the all-reduce are given."""
    if hook is not None and (all_reduce != "auto" or wire_dtype is not None):
        raise ConfigurationError(
            f"ddp_comm_hook replaces the all-reduce of gradients, but all_reduce={all_reduce!r} and "
            f"wire_dtype={wire_dtype!r} were given as well. Give one or the other."
        )


def check_options(options: DDPOptions) -> None:
    """Raise a `ConfigurationError` for an unknown option or a value of the wrong type."""
    ddp_options = {option: value for option, value in options.items() if option not in RANK_DEFAULTS}
    for option in ddp_options:
        if option not in _DDP_OPTIONS:
            raise ConfigurationError(explain_unknown_option("ParalDDPStrategy", option))
    for option, value in ddp_options.items():
        check_type("ParalDDPStrategy", option, value, _TYPES.get(option, Any))
    bucket = options.get("bucket_cap_mb")
    if bucket is not None and not bucket > 0:
        raise ConfigurationError(f"ParalDDPStrategy(bucket_cap_mb={bucket!r}): buckets must be larger than 0 MiB.")


def explain_unused(message: str, names: list[str], rank: int) -> str:
    """Return an explanation of DDP's error `message` that names the unused parameters.

    Args:
        message: torch's message, with parameter indices.
        names: names of the reducer's parameters, in its order.
        rank: this rank.
    """
    found = _INDICES_WITHOUT_GRADIENT.search(message)
    indices = [int(index) for index in found.group(1).split()] if found else []
    # An index is out of range if parameters were unfrozen after the reducer was created.
    unused = [names[index] for index in indices if index < len(names)] or ["(torch does not say which)"]
    return (
        f"On rank {rank} these parameters did not contribute to the loss that the previous training_step returned, so "
        f"they got no gradients: {', '.join(unused)}. If that is intended, set `find_unused_parameters=True` (finds "
        "them in every step), or `static_graph=True` if they are the same in every step: "
        "`strategy=ParalDDPStrategy(find_unused_parameters=True)`. Otherwise make the loss depend on them, or freeze "
        "them with `requires_grad_(False)`."
    )
