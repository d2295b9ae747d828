"""Count the model states: parameters, gradients, optimizer states and buffers, without allocating any."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class ParameterState:
    """The states of one parameter, unsharded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    """Whether it requires a gradient."""
    optimizer_bytes: int = 0
    """Bytes of all optimizer states, also of scalars such as `step`."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of the parameter in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """The size of the gradient in bytes; 0 if the parameter is frozen."""
        return self.num_bytes * self.is_trained


class ModelStates:
    """The states of a module, unsharded. Tied parameters count once. Sizes are in bytes.

    Args:
        parameters: the states of each parameter.
        buffer_bytes: of the buffers.
        num_optimizers: the number of optimizers.
        early_bytes: of the parameters that are built before `configure_model`, so that every rank builds all of them.
    """

    def __init__(
        self, parameters: Sequence[ParameterState], buffer_bytes: int = 0, num_optimizers: int = 1, early_bytes: int = 0
    ) -> None:
        self.parameters, self.buffer_bytes = tuple(parameters), buffer_bytes
        self.num_optimizers, self.early_bytes = num_optimizers, early_bytes
        self.num_params = sum(each.numel for each in parameters)
        self.num_trained = sum(each.numel for each in parameters if each.is_trained)
        self.parameter_bytes = sum(each.num_bytes for each in parameters)
        self.gradient_bytes = sum(each.gradient_bytes for each in parameters)
        self.optimizer_bytes = sum(each.optimizer_bytes for each in parameters)
        self.largest_gradient_bytes = max((each.gradient_bytes for each in parameters), default=0)


def count_states(
    module: Module, optimizers: Sequence[Optimizer], *, early_bytes: int = 0, assume_adam: bool = False
) -> ModelStates:
    """Count the states of `module`; its tensors may be on the meta device, or fake.

    Args:
        module: the module.
        optimizers: its optimizers after a step, so that their states exist. States are counted as they are.
        early_bytes: bytes of the parameters that are built before `configure_model`.
        assume_adam: count two optimizer states per element of each trained parameter instead.
    """
    sizes = {
        parameter: sum(tensor.nbytes for tensor in tensors_in(state))
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
    }
    if assume_adam:
        sizes = {parameter: 2 * parameter.nbytes for parameter in module.parameters() if parameter.requires_grad}
    parameters = [
        ParameterState(
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            is_trained=parameter.requires_grad,
            optimizer_bytes=sizes.get(parameter, 0),
        )
        for parameter in module.parameters()
    ]
    buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())
    return ModelStates(parameters, buffer_bytes, max(1, len(optimizers)), early_bytes)


def tensors_in(data: object) -> list[Tensor]:
    """Return the tensors of a collection."""
    found: list[Tensor] = []
    apply_to_collection(data, Tensor, found.append)
    return found
