"""FSDP2's record of a parameter, sharded and unsharded."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.dtensor import local_of, set_local

_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"
_PRIVATE = "the class is private: no public name leads from a sharded parameter to the unsharded one"

_ENTRIES = {
    attribute: PrivateName(
        name=f"{_PARAM}.{attribute}", purpose=purpose, reason=_PRIVATE, seen="torch 2.11 to 2.13", on_instances=True
    )
    for attribute, purpose in {
        "sharded_param": "to find the shard of a parameter",
        "_sharded_param_data": "to make FSDP2 gather from memory that user code assigned",
        "_unsharded_param": "to find the unsharded parameter",
        "_sharded_post_forward_param": "to recognize a parameter that is resharded over fewer ranks after forward",
        "_param_fqn": "to name a parameter in errors",
        "_module_info": "to find the modules that have a parameter",
        "padded_sharded_param_size": "to know the memory of a shard",
        "fsdp_placement": "to know along which dimension a parameter is sharded",
        "mesh_info": "to know which shard this rank holds",
        "param_dtype": "to know the dtype of the unsharded parameter",
        "orig_dtype": "to name the dtype of a parameter",
        "pin_memory": "to keep shards on the host in pinned memory",
    }.items()
}
NAMES = tuple(_ENTRIES.values())

SHARDS_INTEGERS = torch.__version__ >= "2.12"  # no name says so; `fully_shard` fails midway

name_of: Callable[[Any], str] = attrgetter("_param_fqn")
"""Return the name of the parameter of an `FSDPParam` in the root module."""


def unsharded_param(param: Any) -> Tensor | None:
    """Return the unsharded parameter of an `FSDPParam`, or `None` if it has never been gathered.

    It is the same object each time: FSDP2 only frees and refills its memory.
    """
    return getattr(param, "_unsharded_param", None)


def is_param_of(value: object, param: Any) -> bool:
    """Whether `value` is what FSDP2 sets on modules for an `FSDPParam`: the sharded or the unsharded parameter."""
    own = (getattr(param, name, None) for name in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param"))
    return value is not None and any(value is one for one in own)


def owners_of(param: Any) -> list[tuple[Module, str]]:
    """Return the modules that have the parameter of an `FSDPParam`, and its name in each; several if it is tied."""
    info = param._module_info
    modules, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
    return list(zip(modules, names, strict=True))


def gather_from(param: Any, padded: Tensor, shard: Tensor) -> None:
    """Make FSDP2 gather from other memory.

    Args:
        param: the `FSDPParam`.
        padded: 1-dimensional, with the padding of uneven shards; the input of the all-gather.
        shard: a view of `padded` in the shape of this rank's shard.
    """
    _ENTRIES["_sharded_param_data"].replace_on(param, padded)
    set_local(param.sharded_param, shard)


def local_shard_view(param: Any, whole: Tensor) -> Tensor:
    """Return the view of `whole`, the unsharded parameter, that corresponds to this rank's shard, not empty."""
    local, dim = local_of(param.sharded_param), param.fsdp_placement.dim
    start = param.mesh_info.shard_mesh_rank * param.padded_sharded_param_size[dim]
    return whole.narrow(dim, start, local.size(dim))


def can_be_sharded(parameter: Tensor) -> bool:
    """Whether FSDP2 shards parameters of this dtype: in torch 2.11 every shard has to support gradients."""
    return SHARDS_INTEGERS or parameter.is_floating_point() or parameter.is_complex()


def keep_dtype(param: Any) -> None:
    """Gather a complex `FSDPParam` in its own dtype; torch 2.11 would cast it to 16-bit floats."""
    if not param.orig_dtype.is_floating_point:
        _ENTRIES["param_dtype"].replace_on(param, None)


def is_plain(param: Any) -> bool:
    """Whether an `FSDPParam` was gathered to an ordinary tensor, outside of inference mode.

    With a layout of the user's own it is a DTensor; in inference mode tensors have no version counter.
    """
    return type(param._unsharded_param) is Parameter and not param._unsharded_param.is_inference()
