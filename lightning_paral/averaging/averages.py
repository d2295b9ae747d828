"""Sharded averages of weights, in place of the full copy of the module that Lightning's callbacks keep."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.swa_utils import AveragedModel

from lightning_paral.checkpoint.lazy_tensor import read_into
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.state.weights import sharded_state_dict
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.buffers import RankZeroBuffers


class ShardedAverages:
    """Averages this rank's shards of the weights; replaces the `AveragedModel` of a callback, which it uses inside.

    Created before the module is sharded; `attach` passes the shards. After `end` it refers to the module itself, whose
    weights are the averages then, unless the fit ended early and they were lost.

    Args:
        module: the LightningModule.
        save_frozen: whether checkpoints hold frozen parameters.
        device: device of the averages; `None` for that of the shards.
        options: options of `AveragedModel`.
    """

    prefix = "module."
    """The prefix of the weights' names in the state dict."""

    def __init__(
        self, module: LightningModule, save_frozen: bool, device: torch.device | int | None = None, **options: Any
    ) -> None:
        self._module = module
        self._save_frozen = save_frozen
        self._device = device
        self._options = options
        self._shards: WeightShards | None = None
        self._inner = AveragedModel(Module(), **options)
        self._buffers_of_rank_zero: RankZeroBuffers | None = None
        self._swapped = False
        self._became_weights = False
        self._state_to_read: Mapping[str, Any] | None = None

    def attach(self, shards: WeightShards, buffers: RankZeroBuffers | None) -> None:
        """Start the averages from the current weights.

        Args:
            shards: this rank's shards of the weights.
            buffers: broadcasts averages of buffers, as it does buffers; `None` if the ranks keep their own.
        """
        inner = AveragedModel(_ShardModule(shards.current(), self._module), self._device, **self._options)
        if self._device is None:
            inner.n_averaged = inner.n_averaged.cpu()
        inner.n_averaged.copy_(self._inner.n_averaged)
        self._inner, self._shards, self._buffers_of_rank_zero = inner, shards, buffers
        state, self._state_to_read = self._state_to_read, None
        if state is not None:
            self.load_state_dict(state)

    @property
    def has_shards(self) -> bool:
        """Whether averages of shards exist: from `attach` to `end`."""
        return self._shards is not None

    @property
    def was_lost(self) -> bool:
        """Whether the fit ended before the averages became the module's weights."""
        return not self._became_weights

    def end(self) -> None:
        """Release the shards and their averages, at the end of the fit."""
        self._shards = None
        for name, _ in list(self._inner.module.named_parameters(recurse=False)):
            delattr(self._inner.module, name)

    # Interface of AveragedModel

    @property
    def n_averaged(self) -> Tensor:
        """The number of updates so far."""
        return self._inner.n_averaged

    @property
    def module(self) -> Module:
        """The averages as a module: that of the shards during a fit, the LightningModule itself after it."""
        return self._inner.module if self.has_shards else self._module

    def update_parameters(self, module: Module) -> None:
        """Update the averages with the current weights. Not collective."""
        self._inner.update_parameters(_ShardView(self._attached().current(), module))  # type: ignore[arg-type]

    def to(self, device: Any) -> "ShardedAverages":
        """Move the averages to another device."""
        self._inner.module.to(device)
        return self

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name, as tensors of full shape that hold this rank's shard.

        Raises:
            ConfigurationError: the fit ended before averages became the module's weights.
        """
        state = {self.prefix + name: value for name, value in self._weights().items()}
        return state | ({"n_averaged": self.n_averaged} if self.prefix else {})

    def _weights(self) -> dict[str, Any]:
        if self._shards is None:
            if self.was_lost:
                raise ConfigurationError(
                    "The averages of weights are gone: they were kept as shards, and the fit ended before they became "
                    "the module's weights. Save them during the fit, with ModelCheckpoint(save_on_exception=True)."
                )
            return self._with_averaged_buffers(self._module.state_dict())
        if self._swapped:
            return self._named(self._shards, self._shards.current())
        return self._with_averaged_buffers(self._named(self._shards, list(self._inner.module.parameters())))

    @torch.no_grad()
    def complete(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the module's `weights` for a checkpoint.

        During an evaluation the module holds the averages. Then they are replaced by the weights, which are kept here.
        """
        shards = self._shards
        if shards is None or not self._swapped:
            return weights
        kept = self._with_averaged_buffers(self._named(shards, list(self._inner.module.parameters())))
        numbers = self._numbers()
        named = self._module.named_parameters(remove_duplicate=False)
        have_masters = {name for name, parameter in named if shards.has_master(numbers[id(parameter)])}
        return {name: value if name in have_masters else kept.get(name, value) for name, value in weights.items()}

    def _numbers(self) -> dict[int, int]:
        """Return the index of each of the module's parameters in `WeightShards`, by its `id`."""
        return {id(parameter): number for number, parameter in enumerate(self._module.parameters())}

    def _named(self, shards: WeightShards, values: list[Tensor]) -> dict[str, Any]:
        """Return the module's `state_dict`, with `values` for the parameters."""
        numbers = self._numbers()

        def held(parameter: Parameter) -> Tensor:
            number = numbers[id(parameter)]
            return shards.as_saved(number, values[number].detach())

        return sharded_state_dict(self._module, held, self._save_frozen)

    def _with_averaged_buffers(self, state: dict[str, Any]) -> dict[str, Any]:
        buffers = {_memory_of(own): average for own, average in self._buffers()}
        for name, value in state.items():
            if isinstance(value, Tensor) and not is_sharded(value) and value.numel():
                state[name] = buffers.get(_memory_of(value), value)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load averages from `state`, of which this rank reads its shards; before `attach`, postpone this."""
        if self._shards is None:
            self._state_to_read = state
            return
        if "n_averaged" in state and self.prefix:
            self.n_averaged.copy_(state["n_averaged"])
        named = dict(self._module.named_parameters(remove_duplicate=False))
        numbers = self._numbers()
        averages = list(self._inner.module.parameters())
        read = set()
        for name, parameter in named.items():
            number = numbers[id(parameter)]
            if self.prefix + name in state and number not in read:
                read.add(number)
                self._shards.read(number, state[self.prefix + name], averages[number].detach())
        buffers = {id(own): average for own, average in self._buffers()}
        for name, buffer in self._module.named_buffers():
            if self.prefix + name in state:
                read_into(state[self.prefix + name], buffers[id(buffer)])

    # Weights

    @torch.no_grad()
    def take_current(self) -> None:
        """Set the averages to the current weights and buffers."""
        for average, current in self._pairs(self._attached()):
            average.copy_(current)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averages and weights, buffers included, for an evaluation and after it. *Collective*."""
        shards = self._attached()
        shards.prepare()
        self._broadcast_buffers()
        for average, current in self._pairs(shards):
            before = current.clone()
            current.copy_(average)
            average.copy_(before)
        self._swapped = not self._swapped
        shards.publish(borrowed=self._swapped)

    @torch.no_grad()
    def become_weights(self, *, buffers: bool) -> None:
        """Set the weights of the module, and with `buffers` also its buffers, to the averages. *Collective*."""
        shards = self._attached()
        shards.prepare()
        if buffers:
            self._broadcast_buffers()
        for average, current in self._pairs(shards, buffers=buffers):
            current.copy_(average)
        shards.keep()
        shards.publish(borrowed=False)
        self._became_weights = True

    def current_view(self) -> Any:
        """Return an object whose `parameters()` are the current shards."""
        return _ShardView(self._attached().current(), self._module)

    def _attached(self) -> WeightShards:
        if self._shards is None:
            raise ConfigurationError("Averages of weights exist during trainer.fit only, from the strategy's setup on.")
        return self._shards

    def _pairs(self, shards: WeightShards, *, buffers: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each average with the tensor that it averages; both are writable."""
        averages = (parameter.detach() for parameter in self._inner.module.parameters())
        yield from zip(averages, shards.current(), strict=True)
        if buffers:
            yield from ((average, own.detach()) for own, average in self._buffers())

    def _buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self._module.buffers(), self._inner.module.buffers(), strict=True)

    def _broadcast_buffers(self) -> None:
        if self._buffers_of_rank_zero is not None and not self._swapped:
            self._buffers_of_rank_zero.broadcast_averages(self._inner.module)


class ShardedSWAAverages(ShardedAverages):
    """Replaces the copy of the module that `StochasticWeightAveraging` keeps."""

    prefix = ""

    def parameters(self) -> Iterator[Parameter]:
        """Return this rank's shards of the averages."""
        return self._inner.module.parameters()


class _ShardModule(Module):
    """A module whose parameters are the shards, for `AveragedModel` to copy."""

    def __init__(self, shards: list[Tensor], module: Module) -> None:
        super().__init__()
        for number, shard in enumerate(shards):
            self.register_parameter(f"shard_{number}", Parameter(shard, requires_grad=False))
        for number, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer_{number}", buffer.detach())


class _ShardView:
    """The view of a module that averaging needs: the shards as parameters, and the buffers."""

    def __init__(self, shards: list[Tensor], module: Module) -> None:
        self._shards = shards
        self._module = module

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._shards)

    def buffers(self) -> Iterator[Tensor]:
        return self._module.buffers()


def _memory_of(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
