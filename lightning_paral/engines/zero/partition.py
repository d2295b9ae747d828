"""Partition parameters at stage 3, read and write the shards of those that are partitioned, and restore a module.

A partitioned parameter has this rank's shard and an empty `data`. While it is gathered, `data` is full.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.checkpoint.lazy_tensor import materialize, read_flat_range
from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.compat.deepspeed.engine import is_from_deepspeed, restore_container
from lightning_paral.compat.torch import modules
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.deferred.construction import DeferredConstruction


def is_stage3_parameter(parameter: Any) -> bool:
    """Return whether DeepSpeed has partitioned `parameter`. It may be gathered now."""
    return hasattr(parameter, "ds_id")


def is_partitioned(parameter: Any) -> bool:
    """Return whether this rank has only its shard of `parameter` now: it is of stage 3, and not gathered."""
    return is_stage3_parameter(parameter) and parameter.ds_status.name == "NOT_AVAILABLE"


def full_shape(tensor: Any) -> tuple[int, ...]:
    """Return the full shape of a parameter or buffer, partitioned or not."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def full_numel(parameter: Any) -> int:
    """Return the number of elements of the full parameter, partitioned or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def count_trained(parameters: Iterable[Parameter]) -> int:
    """Return the number of elements of all full parameters that require a gradient."""
    return sum(full_numel(parameter) for parameter in parameters if parameter.requires_grad)


def local_flat_range(parameter: Any) -> tuple[int, int]:
    """Return the start and length of this rank's shard of a flattened parameter of stage 3, without padding."""
    padded_numel = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_numel, padded_numel * parameter.ds_zero_partition_rank)
    return start, min(padded_numel, parameter.ds_numel - start)


def local_shard(parameter: Any) -> Tensor:
    """Return this rank's shard of a parameter of stage 3: 1-dimensional, without padding, not copied."""
    _, numel = local_flat_range(parameter)
    padded: Tensor = parameter.ds_tensor.data
    if padded.numel() < numel:
        raise ConfigurationError(
            "The weights were on NVMe, and were removed when the run ended. Save a checkpoint in the fit, such as in "
            "on_train_end, or use offload_parameters='cpu'."
        )
    return padded[:numel]


# Weights without an fp32 master copy: frozen weights, and all weights outside of a fit


def read_partition(parameter: Any) -> Tensor:
    """Return this rank's shard of `parameter` for a checkpoint; all of it if it is not partitioned."""
    if not is_stage3_parameter(parameter):
        full: Tensor = parameter.detach()
        return full
    start, numel = local_flat_range(parameter)
    return FlatShard(parameter.ds_shape, parameter.dtype, start, numel, lambda: local_shard(parameter).clone())


def write_partition(parameter: Any, full: Tensor) -> bool:
    """Copy this rank's shard of the `full` tensor into `parameter`; copy nothing if it is not partitioned.

    Returns:
        bool: whether `parameter` is partitioned.
    """
    if not is_stage3_parameter(parameter):
        return False
    start, _ = local_flat_range(parameter)
    read_flat_range(full, start, local_shard(parameter))
    write_gathered(parameter, full)
    return True


def write_partitions(written: list[tuple[Parameter, Tensor]]) -> None:
    """Copy this rank's shards of full tensors into those parameters that are partitioned."""
    for parameter, full in written:
        write_partition(parameter, full)


def write_gathered(parameter: Any, full: Tensor) -> None:
    """Copy the `full` tensor into a parameter of stage 3 if it is gathered now, as small ones are between steps."""
    if not is_partitioned(parameter):
        parameter.data.copy_(materialize(full).view(parameter.data.shape))


# Preparing modules and parameters for DeepSpeed


@contextmanager
def show_full_shapes(module: Module) -> Iterator[None]:
    """Give partitioned parameters their full shapes inside this context, with NaN as values, without using memory.

    Otherwise they are empty tensors. `parameter.dim() > 1`, by which many models assign parameters to optimizer groups,
    would be false for all of them.
    """
    parameters: list[Any] = [parameter for parameter in module.parameters() if is_partitioned(parameter)]
    hidden = [(parameter, parameter.data) for parameter in parameters]
    for parameter, empty in hidden:
        parameter.data = empty.new_full((), torch.nan).expand(parameter.ds_shape)
    try:
        yield
    finally:
        for parameter, empty in hidden:
            parameter.data = empty


class ScalarsAsBytes(TorchFunctionMode):
    """Allows byte views of 0-dimensional tensors: torch refuses them, but DeepSpeed broadcasts parameters as bytes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.view and args[1:] == (torch.uint8,):
            args = (args[0].view(args[0].shape or (1,)), torch.uint8)
        return func(*args, **(kwargs or {}))


def make_contiguous(parameter: Any) -> None:
    """Make the memory of a full `parameter` contiguous, because DeepSpeed sends and partitions its bytes in order."""
    if not parameter.is_contiguous():
        parameter.data = parameter.data.contiguous()


def check_not_empty(module: Module) -> None:
    """Raise a `ConfigurationError` if a parameter has no elements: stage 3 would wait for it forever."""
    for name, parameter in module.named_parameters():
        if full_numel(parameter) == 0:
            raise ConfigurationError(
                f"ZeRO stage 3 cannot shard a parameter without elements, and {name!r} has shape "
                f"{full_shape(parameter)}. Leave it out (`None` in its place), make it a buffer, or use paral_zero2."
            )


def check_not_partitioned(module: Module) -> None:
    """Raise a `ConfigurationError` if an earlier run has left `module` partitioned."""
    if any(is_stage3_parameter(parameter) for parameter in module.parameters()):
        name = type(module).__name__
        raise ConfigurationError(
            f"{name} is partitioned already: by an earlier run, which failed or had more weights than host memory, or "
            f"by deepspeed.zero.Init. Construct a new {name}, without zero.Init, and load a checkpoint into it."
        )


# Partitioning parameters one after the other, so that no rank holds all of them in full


@torch.no_grad()
def partition_parameters(module: Module, deferred: DeferredConstruction | None, config: dict[str, Any]) -> None:
    """Partition all parameters of `module`, with the values of rank 0. *Collective* over the world.

    Memory: at a time, each rank holds the parameters of one module in full, or of all that share some.

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
        for parameter in dict.fromkeys(each for part in parts for each in _direct(part)):
            if is_stage3_parameter(parameter):
                continue
            make_contiguous(parameter)
            if dist.get_rank() > 0:
                # The parameter may be a private mapping of a file. Values received into it would occupy memory until
                # the file is unmapped.
                parameter.data = torch.empty_like(parameter)
            with ScalarsAsBytes():
                if partitioned is None:
                    holder = Module()
                    holder.register_parameter("first", parameter)
                    deepspeed.zero.Init(module=holder, config_dict_or_path=config)
                    partitioned = parameter
                else:
                    partitioned.convert_to_zero_parameters(param_list=[parameter])


def _direct(part: Module) -> list[Parameter]:
    return [parameter for parameter in own_parameters(part).values() if parameter is not None]


def _parts_by_parameters(module: Module) -> list[list[Module]]:
    """Return the submodules one by one, but together those that share parameters."""
    holders = Counter(each for part in module.modules() for each in set(_direct(part)))
    groups: dict[Module | None, list[Module]] = {}
    for part in module.modules():
        is_tied = any(holders[each] > 1 for each in _direct(part))
        groups.setdefault(None if is_tied else part, []).append(part)
    return list(groups.values())


# The module as it was before a run


class ModuleSnapshot:
    """Records the attributes and hooks of all submodules and parameters, and removes those that DeepSpeed adds.

    DeepSpeed leaves hooks, methods and references on every module and parameter. They would keep DeepSpeed's buffers
    alive and break the next engine.

    Args:
        module: the module before DeepSpeed gets it.
    """

    def __init__(self, module: Module) -> None:
        self._modules = [(part, _attributes_and_hooks(part)) for part in module.modules()]
        self._parameters = [(parameter, set(vars(parameter))) for parameter in module.parameters()]
        self.was_full = not any(is_stage3_parameter(parameter) for parameter in module.parameters())
        """Whether every rank had all parameters in full, in memory, before the run."""

    @property
    def num_bytes(self) -> int:
        """The size of all full parameters in bytes."""
        return sum(full_numel(parameter) * parameter.element_size() for parameter, _ in self._parameters)

    def restore(self, gather: bool) -> None:
        """Remove what DeepSpeed added, and leave parameters full, in host memory, without gradients.

        *Collective* over the world if `gather`. Otherwise, partitioned parameters stay partitioned.
        """
        partitioned = any(is_stage3_parameter(parameter) for parameter, _ in self._parameters)
        unpartition = gather or (self.was_full and not partitioned)
        if unpartition:
            for parameter, names in self._parameters:
                parameter.data = _full_on_host(parameter)
                parameter.grad = None
                for name in set(vars(parameter)) - (names if self.was_full else _users_attributes(parameter)):
                    delattr(parameter, name)
        for part, recorded in self._modules:
            _restore_module(part, *recorded)


def _users_attributes(parameter: Any) -> set[str]:
    """Return the names of the attributes that DeepSpeed did not set on `parameter`, which was built partitioned."""
    return {name for name, value in vars(parameter).items() if not is_from_deepspeed(name, value)}


def _full_on_host(parameter: Any) -> Tensor:
    was_partitioned = is_partitioned(parameter)
    if was_partitioned:
        parameter.all_gather()
    full: Tensor = parameter.data.detach().to("cpu", copy=True).view(full_shape(parameter))
    if was_partitioned:
        parameter.partition()  # the next parameter needs the buffer of one on NVMe
    return full


def _attributes_and_hooks(part: Module) -> tuple[set[str], dict[str, set[int]]]:
    """Return the names of the attributes of a module, and the keys of its hooks by attribute."""
    return set(vars(part)), {name: set(modules.hooks_in(part, name)) for name in modules.ALL}


def _restore_module(part: Module, names: set[str], hooks: dict[str, set[int]]) -> None:
    restore_container(part)
    for name, recorded_keys in hooks.items():
        installed = modules.hooks_in(part, name)
        for key in set(installed) - recorded_keys:
            del installed[key]
    for name in set(vars(part)) - names:
        if is_from_deepspeed(name, vars(part)[name]):
            delattr(part, name)
