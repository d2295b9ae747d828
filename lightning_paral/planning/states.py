"""Count the model states: parameters, gradients, optimizer states and buffers, without allocating any."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
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

    def numel_by_dtype(self) -> dict[str, int]:
        """Return the number of elements of the parameters by dtype, for example `{"float32": 1000}`."""
        numels: dict[str, int] = {}
        for parameter in self.parameters:
            name = str(parameter.dtype).removeprefix("torch.")
            numels[name] = numels.get(name, 0) + parameter.numel
        return numels


def count_states(module: Module, optimizers: Iterable[Optimizer] = ()) -> ModelStates:
    """Count the states of `module`; its tensors may be on the meta device, or fake.

    Args:
        module: the module.
        optimizers: its optimizers after a step, so that their states exist. States are counted as they are.
    """
    optimizers = list(optimizers)
    states: dict[Tensor, list[Tensor]] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            states.setdefault(parameter, []).extend(_tensors(state))
    parameters = tuple(
        ParameterState(
            name=name,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            is_trained=parameter.requires_grad,
            optimizer_numel=sum(state.numel() for state in states.get(parameter, ()) if state.dim()),
            optimizer_bytes=sum(state.numel() * state.element_size() for state in states.get(parameter, ())),
        )
        for name, parameter in module.named_parameters()
    )
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    return ModelStates(parameters=parameters, buffer_bytes=buffers, num_optimizers=max(1, len(optimizers)))


def assume_adam(states: ModelStates) -> ModelStates:
    """Return `states` with two optimizer states per element of each trained parameter, in its dtype, as Adam has."""
    parameters = tuple(
        replace(parameter, optimizer_numel=2 * parameter.numel, optimizer_bytes=2 * parameter.num_bytes)
        if parameter.is_trained
        else parameter
        for parameter in states.parameters
    )
    return replace(states, parameters=parameters)


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in _tensors(value)]
    if isinstance(state, list | tuple):
        return [tensor for value in state for tensor in _tensors(value)]
    return []
