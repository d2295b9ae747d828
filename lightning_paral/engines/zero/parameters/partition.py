"""Parameters that DeepSpeed has partitioned or is about to: their true shapes, a rank's part, the way back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.compat.deepspeed import parameter_files
from lightning_paral.compat.deepspeed.modules import end_forward, is_of_division, is_of_engine, restore_container
from lightning_paral.compat.deepspeed.parameters import is_from_deepspeed, join_group
from lightning_paral.compat.torch import module_hooks
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.errors import ConfigurationError


def is_partitioned(parameter: Any) -> bool:
    """Whether `parameter` is one of ZeRO stage 3 of which this rank holds a part only, now."""
    return hasattr(parameter, "ds_id") and parameter.ds_status.name == "NOT_AVAILABLE"


def run_of_partition(parameter: Any) -> tuple[int, int]:
    """Return start and number of the elements this rank holds of a parameter of stage 3."""
    share = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_numel, share * parameter.ds_zero_partition_rank)
    return start, min(share, parameter.ds_numel - start)


def lies_in(folder: Path, parameter: Any) -> bool:
    """Whether this rank's part of `parameter` is in a file below `folder`, and only there."""
    on_nvme = is_partitioned(parameter) and parameter_files.is_in_file_only(parameter)
    return on_nvme and parameter_files.folder_of(parameter).is_relative_to(folder)


@contextmanager
def true_shapes(module: Module) -> Iterator[None]:
    """Let partitioned parameters show their true shapes, without any memory, and NaN as values.

    DeepSpeed leaves an empty tensor in their place: `parameter.dim() > 1`, which so many optimizers' groups are made
    by, would be false for all of them.
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


class _ScalarsAsBytes(TorchFunctionMode):
    """DeepSpeed broadcasts parameters as bytes, by `tensor.view(torch.uint8)`, which torch refuses for a scalar."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.view and len(args) == 2 and args[1] is torch.uint8 and args[0].dim() == 0:
            args = (args[0].view(1), torch.uint8)
        return func(*args, **(kwargs or {}))


def scalars_as_bytes() -> TorchFunctionMode:
    """Return a context in which 0-dimensional parameters can be broadcast by DeepSpeed."""
    return _ScalarsAsBytes()


def make_contiguous(parameter: Any) -> None:
    """Lay out a whole `parameter` row by row: DeepSpeed sends and divides it as bytes in this order."""
    if not parameter.is_contiguous():
        parameter.data = parameter.data.contiguous()


def check_not_empty(module: Module) -> None:
    """Raise a `ConfigurationError` if a parameter has no elements: stage 3 would wait for them in vain."""
    for name, parameter in module.named_parameters():
        if getattr(parameter, "ds_numel", parameter.numel()) == 0:
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            raise ConfigurationError(
                f"ZeRO stage 3 cannot divide a parameter without elements, and {name!r} has shape {shape}. Leave it "
                "out (`None` in its place), make it a buffer, or use paral_zero2."
            )


def rejoin(module: Module) -> None:
    """Give parameters partitioned in a run before the process group of this one, also if that run failed.

    Raises:
        ConfigurationError: they were partitioned among another number of ranks.
    """
    from deepspeed.comm import get_rank, get_world_group, get_world_size

    partitioned: list[Any] = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
    # A failure inside a forward leaves modules and parameters as if they were still in use.
    for part in module.modules():
        end_forward(part)
    for parameter in partitioned:
        if parameter.ds_zero_partition_world_size != get_world_size() or parameter.ds_zero_partition_rank != get_rank():
            raise ConfigurationError(
                f"{type(module).__name__} was partitioned by a run with {parameter.ds_zero_partition_world_size} ranks "
                f"and is now used with {get_world_size()}. Use as many, or load a checkpoint into a new module."
            )
        join_group(parameter, get_world_group())


class Belongings:
    """What modules and parameters held before DeepSpeed took them, to give them back as they were.

    DeepSpeed leaves hooks, methods and references on every module and parameter, which keep its buffers alive and
    break the next engine.
    """

    def __init__(self, module: Module) -> None:
        self._modules = [(part, _contents(part)) for part in module.modules()]
        self._parameters = [(parameter, set(vars(parameter))) for parameter in module.parameters()]
        self.were_whole = not any(hasattr(parameter, "ds_id") for parameter in module.parameters())
        """Whether the module has already been in the memory of every rank."""

    @property
    def are_on_nvme(self) -> bool:
        """Whether parameters were built in files, which stay there."""
        return any(parameter_files.has_file(parameter) for parameter, _ in self._parameters)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters, whole."""
        return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p, _ in self._parameters)

    def restore(self, gather: bool) -> None:
        """Take away what DeepSpeed added. Parameters are whole again, on the host.

        *Collective* over the world if `gather`. Otherwise partitioned parameters stay as they are.
        """
        partitioned = any(hasattr(parameter, "ds_id") for parameter, _ in self._parameters)
        unpartition = gather or (self.were_whole and not partitioned)
        if unpartition:
            for parameter, names in self._parameters:
                parameter.data = _whole_on_host(parameter)
                parameter.grad = None
                for name in set(vars(parameter)) - (names if self.were_whole else _of_users(parameter)):
                    delattr(parameter, name)
        for part, contents in self._modules:
            _restore_contents(part, contents, unpartition)


def _of_users(parameter: Any) -> set[str]:
    """Return the names of the attributes of a parameter that was built partitioned which DeepSpeed did not give it."""
    return {name for name, value in vars(parameter).items() if not is_from_deepspeed(name, value)}


def _whole_on_host(parameter: Any) -> Tensor:
    if is_partitioned(parameter):
        parameter.all_gather()
    shape = getattr(parameter, "ds_shape", parameter.shape)
    whole: Tensor = parameter.data.detach().to("cpu", copy=True).view(shape)
    return whole


def _contents(part: Module) -> tuple[set[str], dict[str, set[int]], type]:
    hooks = {name: set(module_hooks.hooks_in(part, name)) for name in module_hooks.ALL}
    return set(vars(part)), hooks, type(own_parameters(part))


def _restore_contents(part: Module, contents: tuple[set[str], dict[str, set[int]], type], unpartition: bool) -> None:
    names, hooks, kind = contents
    for name, kept in hooks.items():
        installed = module_hooks.hooks_in(part, name)
        for key in set(installed) - kept:
            del installed[key]
    for name in set(vars(part)) - names:
        if is_of_engine(name) or (unpartition and is_of_division(name)):
            delattr(part, name)
    if unpartition:
        restore_container(part, kind)


def count_trained(parameters: Iterable[Parameter]) -> int:
    """Return the number of elements in parameters that require a gradient, partitioned or not."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters if p.requires_grad)
