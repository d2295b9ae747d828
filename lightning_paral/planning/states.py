"""Count the model states: parameters, gradients, optimizer states and buffers, without allocating any."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class ParameterState:
    """The states of one parameter, unsharded."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    """Whether it requires a gradient."""
    optimizer_numel: int = 0
    """Elements of optimizer states of the parameter's size; two per element for Adam."""
    optimizer_bytes: int = 0
    """Bytes of all optimizer states, also of scalars such as `step`."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def num_bytes(self) -> int:
        """The size of the parameter in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """The size of the gradient in bytes; 0 if the parameter is frozen."""
        return self.num_bytes if self.is_trained else 0


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """The states of a module, unsharded. Tied parameters count once."""

    parameters: tuple[ParameterState, ...]
    buffer_bytes: int
    num_optimizers: int = 1
    early_bytes: int = 0
    """Bytes of the parameters that are built before `configure_model`, so that every rank builds all of them."""

    @property
    def num_params(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_trained(self) -> int:
        """The number of elements of the parameters that require a gradient."""
        return sum(parameter.numel for parameter in self.parameters if parameter.is_trained)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.num_bytes for parameter in self.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(parameter.gradient_bytes for parameter in self.parameters)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of all optimizer states."""
        return sum(parameter.optimizer_bytes for parameter in self.parameters)


def count_states(module: Module, optimizers: Iterable[Optimizer] = (), *, assume_adam: bool = False) -> ModelStates:
    """Count the states of `module`; its tensors may be on the meta device, or fake.

    Args:
        module: the module.
        optimizers: its optimizers after a step, so that their states exist. States are counted as they are.
        assume_adam: count two optimizer states per element of each trained parameter instead.
    """
    optimizers = list(optimizers)
    states: dict[Tensor, list[Tensor]] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            apply_to_collection(state, Tensor, states.setdefault(parameter, []).append)
    parameters = []
    for name, parameter in module.named_parameters():
        counted = ParameterState(
            name=name, shape=tuple(parameter.shape), dtype=parameter.dtype, is_trained=parameter.requires_grad
        )
        own: Any = states.get(parameter, ())
        numel = sum(state.numel() for state in own if state.dim())
        num_bytes = sum(state.numel() * state.element_size() for state in own)
        if assume_adam:
            numel, num_bytes = 2 * counted.numel * counted.is_trained, 2 * counted.gradient_bytes
        parameters.append(replace(counted, optimizer_numel=numel, optimizer_bytes=num_bytes))
    return ModelStates(
        parameters=tuple(parameters),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        num_optimizers=max(1, len(optimizers)),
    )
