"""Free gathered parameters between forward and backward, although autograd saves views of them.

Stage 3 frees a parameter after the forward pass of its module by giving it an empty `data`. Memory is freed only if
nothing else refers to it, but `torch.nn.functional.linear` saves `weight.t()`, a view. Without the hooks of this file
all weights of linear layers would be in memory when the backward pass begins. DeepSpeed replaces `linear` by a function
of its own in models that are built inside `deepspeed.zero.Init`; it rounds differently, and covers only `linear`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.engines.zero.partition import is_partitioned, is_stage3_parameter
from lightning_paral.engines.zero.user_access import plain_data
from lightning_paral.errors import ConfigurationError


class _SavedView(NamedTuple):
    """Takes the place of a view of a gathered parameter that autograd has saved."""

    parameter: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_steps: int
    """The number of steps that had changed the parameter when the view was saved."""


class _SavedParameter(NamedTuple):
    """Takes the place of a parameter itself, which the backward pass gathers again."""

    parameter: Any
    num_steps: int
    """The number of steps that had changed the parameter when it was saved."""


class SavedWeights:
    """Makes autograd save which view of which parameter it needs, instead of the view itself.

    Args:
        module: the module whose parameters stage 3 has partitioned, with the hooks of DeepSpeed.
        num_steps: a function that returns the number of steps so far.
        undo: removes the hooks when it is closed.
    """

    def __init__(self, module: Module, num_steps: Callable[[], int], undo: ExitStack) -> None:
        self._num_steps = num_steps
        self._by_address: dict[int, Any] = {}
        for part in module.modules():
            if any(is_stage3_parameter(parameter) for parameter in part.parameters(recurse=False)):
                # After the hook of DeepSpeed, which gathers the parameters.
                undo.callback(part.register_forward_pre_hook(self._remember).remove)

    @contextmanager
    def saving_views(self) -> Iterator[None]:
        """Save views of gathered parameters as such in forward passes inside this context.

        Activation checkpointing, and hooks for saved tensors that user code adds, take precedence.
        """
        with saved_tensors_hooks(self._pack, self._unpack):
            try:
                yield
            finally:
                self._by_address.clear()

    def _remember(self, module: Module, _: Any) -> None:
        own: Any = own_parameters(module)
        for parameter in own.values():
            if parameter is not None and is_stage3_parameter(parameter) and not parameter.ds_persist:
                self._by_address[plain_data(parameter).untyped_storage().data_ptr()] = parameter

    def _pack(self, tensor: Tensor) -> Any:
        if is_stage3_parameter(tensor):
            return _SavedParameter(tensor, self._num_steps())
        if not self._by_address or type(tensor) is not Tensor:
            return tensor
        address = tensor.untyped_storage().data_ptr()
        parameter = self._by_address.get(address)
        if parameter is None or is_partitioned(parameter):
            return tensor
        full = plain_data(parameter)
        if full.untyped_storage().data_ptr() != address or full.dtype != tensor.dtype:
            return tensor
        offset = int(tensor.storage_offset() - full.storage_offset())
        return _SavedView(parameter, tuple(tensor.shape), tensor.stride(), offset, self._num_steps())

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _SavedView | _SavedParameter):
            tensor: Tensor = packed
            return tensor
        if packed.num_steps != self._num_steps():
            raise ConfigurationError(
                "An optimizer step ran between a forward pass and its backward pass, which needs the weights of the "
                "forward pass. Under ZeRO stage 3 these are freed. Run the backward pass before the step, or train "
                "with paral_zero2."
            )
        if isinstance(packed, _SavedParameter):
            parameter: Tensor = packed.parameter
            return parameter
        if not is_partitioned(packed.parameter):
            return _view(packed)
        packed.parameter.all_gather()  # every rank runs the same backward pass
        try:
            return _view(packed).clone()
        finally:
            packed.parameter.partition()


def _view(packed: _SavedView) -> Tensor:
    full = plain_data(packed.parameter)
    return full.as_strided(packed.size, packed.stride, full.storage_offset() + packed.offset)
