"""FSDP2's private object for a parameter, `FSDPParam`, which has the sharded and the unsharded parameter."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.private_name import Names, replace
from lightning_paral.compat.torch.dtensor import local_of, set_local

NAMES: Names = {
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": {
        ".sharded_param": "find the shard of a parameter",
        "._sharded_param_data": "make FSDP2 gather from memory that user code has assigned",
        "._unsharded_param": "find the unsharded parameter",
        "._sharded_post_forward_param": "recognize a parameter that is resharded over fewer ranks after forward",
        "._param_fqn": "name a parameter in errors",
        "._module_info": "find the modules that have a parameter",
        ".padded_sharded_param_size": "know the size of a shard with padding",
        ".fsdp_placement": "know along which dimension a parameter is sharded",
        ".mesh_info": "know which shard this rank holds",
        ".param_dtype": "know the dtype of the unsharded parameter",
        ".orig_dtype": "name the dtype of a parameter",
        ".pin_memory": "keep shards on the host in pinned memory",
        ".is_dtensor": "unshard parameters that all tensor ranks have in full to plain tensors",
        "._unsharded_dtensor_spec >=2.13": "unshard parameters that all tensor ranks have in full to plain tensors",
    },
}

SHARDS_INTEGERS = torch.__version__ >= "2.12"  # in torch 2.11, `fully_shard` fails halfway on integer parameters

name_of: Callable[[Any], str] = attrgetter("_param_fqn")
"""Return the name of the parameter of an `FSDPParam` in the root module."""


def unsharded_param(param: Any) -> Tensor | None:
    """Return the unsharded parameter of an `FSDPParam`, or `None` if it has never been unsharded.

    The result is the same object each time: FSDP2 frees and refills its memory.
    """
    return getattr(param, "_unsharded_param", None)


def is_param_of(value: object, param: Any) -> bool:
    """Return whether `value` is the sharded or unsharded parameter that FSDP2 sets on modules for an `FSDPParam`."""
    own = (getattr(param, name, None) for name in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param"))
    return value is not None and any(value is one for one in own)


def owners_of(param: Any) -> list[tuple[Module, str]]:
    """Return the modules that own the parameter of an `FSDPParam`, with its name in each: several if it is tied."""
    info = param._module_info
    modules, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
    return list(zip(modules, names, strict=True))


def gather_from(param: Any, padded: Tensor, shard: Tensor) -> None:
    """Make FSDP2 gather a parameter from memory that it has not allocated.

    Args:
        param: the `FSDPParam`.
        padded: the new input of the all-gather: 1-dimensional, and padded if shards are uneven.
        shard: a view of `padded` in the shape of this rank's shard.
    """
    replace(param, "_sharded_param_data", padded)
    set_local(param.sharded_param, shard)


def local_shard_view(param: Any, unsharded: Tensor) -> Tensor:
    """Return the view of `unsharded`, the unsharded parameter, that corresponds to this rank's nonempty shard."""
    local, dim = local_of(param.sharded_param), param.fsdp_placement.dim
    start = param.mesh_info.shard_mesh_rank * param.padded_sharded_param_size[dim]
    return unsharded.narrow(dim, start, local.size(dim))


def can_be_sharded(parameter: Tensor) -> bool:
    """Return whether FSDP2 shards parameters of this dtype: in torch 2.11, the dtype must support gradients."""
    return SHARDS_INTEGERS or parameter.is_floating_point() or parameter.is_complex()


def keep_dtype(param: Any) -> None:
    """Gather a complex or integer `FSDPParam` in its own dtype; torch 2.11 would cast it to `param_dtype`."""
    if not param.orig_dtype.is_floating_point:
        replace(param, "param_dtype", None)


def is_plain(param: Any) -> bool:
    """Return whether an `FSDPParam` was unsharded to an ordinary `Parameter`, outside of inference mode.

    A parameter that was a DTensor before `fully_shard` is unsharded to a DTensor, and inference tensors have no version
    counter.
    """
    return type(param._unsharded_param) is Parameter and not param._unsharded_param.is_inference()


def unshard_replicas_to_plain(param: Any) -> None:
    """Unshard an `FSDPParam` to an ordinary tensor if all tensor ranks have it in full. Call it after `fully_shard`.

    FSDP2 would unshard it to a DTensor, which cannot be combined with the activations, ordinary tensors.
    """
    if param.is_dtensor and param.sharded_param.placements[-1].is_replicate():
        replace(param, "is_dtensor", False)
        if hasattr(param, "_unsharded_dtensor_spec"):  # from torch 2.13 on, it decides what the parameter becomes
            replace(param, "_unsharded_dtensor_spec", None)
