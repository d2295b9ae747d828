"""Sharded averages of weights, which replace the full copy of the module that Lightning's callbacks keep."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.swa_utils import AveragedModel

from lightning_paral.checkpoint.lazy_tensor import read_into
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.weights import sharded_state_dict
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.buffers import RankZeroBuffers


class ShardedAverages:
    """Averages this rank's shards of the weights. A callback uses it like an `AveragedModel` of the full module.

    It is created before the module is sharded, and `attach` gives it the shards. After `end`, it refers to the module
    itself, whose weights are now the averages. If the fit ended before `become_weights`, the averages are lost.

    Args:
        module: the LightningModule.
        save_frozen: whether checkpoints hold frozen parameters.
        prefix: what the names of weights begin with in the state dict; empty for a copy of the module.
        device: device of the averages; `None` for the device of the shards.
        options: options of the `AveragedModel` that averages the shards.
    """

    def __init__(
        self,
        module: LightningModule,
        save_frozen: bool,
        prefix: str = "module.",
        device: torch.device | int | None = None,
        **options: Any,
    ) -> None:
        self._own, self._save_frozen, self._prefix = module, save_frozen, prefix
        self._device, self._options = device, options
        self.module: Module = module
        """The averages: this rank's shards and all buffers during a fit, the LightningModule before and after it."""
        self.n_averaged = torch.tensor(0, dtype=torch.long)
        """The number of updates so far."""
        self.is_lost = True
        """Whether the averages have not become the weights of the module."""
        self._inner: AveragedModel | None = None
        self._shards: WeightShards | None = None
        self._buffers: RankZeroBuffers | None = None
        self._is_swapped = False
        self._state_to_read: Mapping[str, Any] | None = None

    def attach(self, shards: WeightShards, buffers: RankZeroBuffers | None) -> None:
        """Start the averages from the current weights.

        Args:
            shards: this rank's shards of the weights.
            buffers: broadcasts rank 0's buffers, and the averages of them; `None` if each rank keeps its own.
        """
        current = Module()
        for number, shard in enumerate(shards.current()):
            current.register_parameter(f"shard_{number}", Parameter(shard, requires_grad=False))
        for number, buffer in enumerate(self._own.buffers()):
            current.register_buffer(f"buffer_{number}", buffer.detach())
        self._inner = AveragedModel(current, self._device, **self._options)  # copies them
        self._inner.n_averaged = self.n_averaged
        self.module, self._shards, self._buffers = self._inner.module, shards, buffers
        if self._state_to_read is not None:
            self.load_state_dict(self._state_to_read)
            self._state_to_read = None

    @property
    def has_shards(self) -> bool:
        """Whether averages of shards exist: from `attach` to `end`."""
        return self._shards is not None

    def end(self) -> None:
        """Release the shards and their averages. Call it at the end of the fit."""
        self.module, self._inner, self._shards = self._own, None, None

    # Interface of AveragedModel, and of the copy that StochasticWeightAveraging keeps

    def parameters(self) -> Iterator[Parameter]:
        """Return this rank's shards of the averages."""
        return self.module.parameters()

    def update_parameters(self, module: Module) -> None:
        """Update the averages with the current weights. No collective."""
        assert self._inner is not None
        self._inner.update_parameters(self.current_view())

    def current_view(self) -> Any:
        """Return an object whose `parameters()` are the current shards, in place of a module."""
        current = self._attached().current()
        return SimpleNamespace(parameters=lambda: iter(current), buffers=self._own.buffers)

    def to(self, device: Any) -> "ShardedAverages":
        """Move the averages to another device."""
        if self.has_shards:
            self.module.to(device)
        return self

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name, as tensors of the full shape that hold this rank's shard.

        Raises:
            ConfigurationError: the averages were lost, because the fit ended before they became the module's weights.
        """
        if self._shards is None and self.is_lost:
            raise ConfigurationError(
                "The averages of weights were lost: they were sharded, and the fit ended before they became the "
                "module's weights. Save them during the fit, with ModelCheckpoint(save_on_exception=True)."
            )
        if self._shards is None:
            state: dict[str, Any] = self._own.state_dict()
        elif self._is_swapped:
            state = self._state_with(self._shards.current())
        else:
            state = self._state_of_averages()
        named = {self._prefix + name: value for name, value in state.items()}
        return named | ({"n_averaged": self.n_averaged} if self._prefix else {})

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of the averages in `state`. Before `attach`, postpone this until then."""
        if self._shards is None:
            self._state_to_read = state
            return
        if self._prefix:
            self.n_averaged.copy_(state["n_averaged"])
        numbers, averages = self._numbers(), dict(enumerate(self.parameters()))
        for name, parameter in self._own.named_parameters(remove_duplicate=False):
            number = numbers[id(parameter)]
            if self._prefix + name in state and number in averages:
                self._shards.read(number, state[self._prefix + name], averages.pop(number).detach())
        for (name, _), average in zip(self._own.named_buffers(), self.module.buffers(), strict=True):
            if self._prefix + name in state:
                read_into(state[self._prefix + name], average)

    @torch.no_grad()
    def weights_to_save(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights for a checkpoint, in place of the averages that the module holds during an evaluation.

        Args:
            weights: the module's `state_dict`.
        """
        if not (self._is_swapped and self._shards is not None):
            return weights
        numbers, swapped_out = self._numbers(), self._state_of_averages()
        named = self._own.named_parameters(remove_duplicate=False)
        masters = {name for name, parameter in named if self._shards.has_master(numbers[id(parameter)])}
        return {name: value if name in masters else swapped_out.get(name, value) for name, value in weights.items()}

    def _state_of_averages(self) -> dict[str, Any]:
        state = self._state_with([average.detach() for average in self.parameters()])
        # By memory, because a module may give its buffers other names in its state dict.
        averages = {(own.data_ptr(), own.shape): average for average, own in self._pairs_of_buffers()}
        for name, value in state.items():
            if isinstance(value, Tensor) and not is_sharded(value) and value.numel():
                state[name] = averages.get((value.data_ptr(), value.shape), value)
        return state

    def _state_with(self, values: list[Tensor]) -> dict[str, Any]:
        """Return the module's `state_dict` with `values`, this rank's shards, as its parameters."""
        shards, numbers = self._attached(), self._numbers()

        def saved(parameter: Parameter) -> Tensor:
            number = numbers[id(parameter)]
            return shards.as_saved(number, values[number])

        return sharded_state_dict(self._own, saved, self._save_frozen)

    def _numbers(self) -> dict[int, int]:
        """Return the index in `WeightShards` of each parameter of the module, by the `id` of the parameter."""
        return {id(parameter): number for number, parameter in enumerate(self._own.parameters())}

    # Weights

    @torch.no_grad()
    def take_current(self) -> None:
        """Set the averages to the current weights and buffers."""
        for average, current in (*self._pairs(), *self._pairs_of_buffers()):
            average.copy_(current)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and buffers with their averages. Call it before and after an evaluation. *Collective*."""
        shards = self._attached()
        shards.prepare()
        self._broadcast_buffers()
        for average, current in (*self._pairs(), *self._pairs_of_buffers()):
            before = current.clone()
            current.copy_(average)
            average.copy_(before)
        self._is_swapped = not self._is_swapped
        shards.publish(borrowed=self._is_swapped)

    @torch.no_grad()
    def become_weights(self, *, buffers: bool) -> None:
        """Set the weights of the module to the averages, and its buffers as well if `buffers`. *Collective*."""
        shards = self._attached()
        shards.prepare()
        if buffers:
            self._broadcast_buffers()
        for average, current in (*self._pairs(), *(self._pairs_of_buffers() if buffers else ())):
            current.copy_(average)
        shards.keep()
        shards.publish(borrowed=False)
        self.is_lost = False

    def _attached(self) -> WeightShards:
        if self._shards is None:
            raise ConfigurationError("Averages of weights exist only during trainer.fit, after the strategy's setup.")
        return self._shards

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of each average, and the one of the weight; both are writable."""
        averages = (average.detach() for average in self.parameters())
        yield from zip(averages, self._attached().current(), strict=True)

    def _pairs_of_buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the average of each buffer, and the buffer."""
        yield from zip(self.module.buffers(), (own.detach() for own in self._own.buffers()), strict=True)

    def _broadcast_buffers(self) -> None:
        if self._buffers is not None and not self._is_swapped:
            self._buffers.broadcast_averages(self.module)
