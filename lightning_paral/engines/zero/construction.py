"""Partition the parameters of a stage-3 module one after the other, so that no rank holds all of them in full."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.engines.zero.partition import is_stage3_parameter, make_contiguous, view_scalars_as_bytes
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.quantities import format_bytes


@torch.no_grad()
def partition_parameters(module: Module, deferred: DeferredConstruction | None, config: dict[str, Any]) -> None:
    """Partition all parameters of `module`, with the values of rank 0. *Collective* over the world.

    Memory: at a time, each rank holds the parameters of one module in full, and of those that share them.

    Args:
        module: the module. Some of its parameters may be partitioned already.
        deferred: computes the values of parameters that have none yet; `None` if all have values.
        config: DeepSpeed's configuration.
    """
    import deepspeed

    partitioned: Any = next((each for each in module.parameters() if is_stage3_parameter(each)), None)
    for parts in _parts_by_parameters(module):
        if deferred is not None:
            deferred.fill(parts)
        for parameter in _own_parameters(parts):
            if is_stage3_parameter(parameter):
                continue
            make_contiguous(parameter)
            if dist.get_rank() > 0:
                # The parameter may be a private mapping of a file. Values received into it would occupy memory until
                # the file is unmapped.
                parameter.data = torch.empty_like(parameter)
            with view_scalars_as_bytes():
                if partitioned is None:
                    holder = Module()
                    holder.register_parameter("first", parameter)
                    deepspeed.zero.Init(module=holder, config_dict_or_path=config)
                    partitioned = parameter
                else:
                    partitioned.convert_to_zero_parameters(param_list=[parameter])


def _own_parameters(parts: list[Module]) -> list[Parameter]:
    found: dict[Parameter, None] = {}
    for part in parts:
        found.update(dict.fromkeys(each for each in own_parameters(part).values() if each is not None))
    return list(found)


def _parts_by_parameters(module: Module) -> Iterator[list[Module]]:
    """Yield the submodules one by one, but together those that share parameters."""
    holders: dict[Parameter, list[Module]] = {}
    for part in module.modules():
        for parameter in _own_parameters([part]):
            holders.setdefault(parameter, []).append(part)
    done: set[Module] = set()
    for part in module.modules():
        parts = [part]
        for each in parts if part not in done else ():  # grows
            parts += [other for p in _own_parameters([each]) for other in holders[p] if other not in parts]
        if part not in done:
            done.update(parts)
            yield parts


def warn_about_full_parameters(module: Module) -> None:
    """Warn if `module` has parameters that were built in full on every rank."""
    full = [parameter for parameter in module.parameters() if not is_stage3_parameter(parameter)]
    if full:
        size = format_bytes(sum(parameter.numel() * parameter.element_size() for parameter in full))
        rank_zero_warn(
            f"{type(module).__name__} was built outside `configure_model`: every rank holds all parameters "
            f"({size}) in host memory until they are partitioned, and again at the end of the fit. Build "
            "them in `configure_model`, where they are partitioned one by one."
        )
