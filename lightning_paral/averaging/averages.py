"""Sharded averages of weights, which replace the full copy of the module that Lightning's callbacks keep."""

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
    """Averages this rank's shards of the weights. A callback uses it like an `AveragedModel` of the full module.

    It is created before the module is sharded, and `attach` gives it the shards. After `end`, it refers to the module
    itself, whose weights are now the averages. If the fit ended before `become_weights`, the averages are lost.

    Args:
        module: the LightningModule.
        save_frozen: whether checkpoints hold frozen parameters.
        device: device of the averages; `None` for the device of the shards.
        options: options of the `AveragedModel` that averages the shards.
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
        self._rank_zero_buffers: RankZeroBuffers | None = None
        self._swapped = False
        self._became_weights = False
        self._state_to_read: Mapping[str, Any] | None = None

    def attach(self, shards: WeightShards, buffers: RankZeroBuffers | None) -> None:
        """Start the averages from the current weights.

        Args:
            shards: this rank's shards of the weights.
            buffers: broadcasts rank 0's buffers, and the averages of them; `None` if each rank keeps its own.
        """
        inner = AveragedModel(_ShardModule(shards.current(), self._module), self._device, **self._options)
        if self._device is None:
            inner.n_averaged = inner.n_averaged.cpu()
        inner.n_averaged.copy_(self._inner.n_averaged)
        self._inner, self._shards, self._rank_zero_buffers = inner, shards, buffers
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
        """Release the shards and their averages. Call it at the end of the fit."""
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
        """A module whose parameters are the averages: of shards during a fit; after it, the LightningModule itself."""
        return self._inner.module if self.has_shards else self._module

    def update_parameters(self, module: Module) -> None:
        """Update the averages with the current weights. No collective."""
        self._inner.update_parameters(_ShardView(self._require_shards().current(), module))  # type: ignore[arg-type]

    def to(self, device: Any) -> "ShardedAverages":
        """Move the averages to another device."""
        self._inner.module.to(device)
        return self

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name, as tensors of the full shape that hold this rank's shard.

        Raises:
            ConfigurationError: the averages were lost, because the fit ended before they became the module's weights.
        """
        state = {self.prefix + name: value for name, value in self._state_without_prefix().items()}
        return state | ({"n_averaged": self.n_averaged} if self.prefix else {})

    def _state_without_prefix(self) -> dict[str, Any]:
        if self._shards is None:
            if self.was_lost:
                raise ConfigurationError(
                    "The averages of weights were lost: they were sharded, and the fit ended before they became the "
                    "module's weights. Save them during the fit, with ModelCheckpoint(save_on_exception=True)."
                )
            return self._with_averaged_buffers(self._module.state_dict())
        if self._swapped:
            return self._state_with(self._shards, self._shards.current())
        return self._with_averaged_buffers(self._state_with(self._shards, list(self._inner.module.parameters())))

    @torch.no_grad()
    def weights_to_save(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the module's weights for a checkpoint.

        During an evaluation, the module holds the averages, and this object holds the weights.

        Args:
            weights: the module's `state_dict`. During an evaluation, the averages in it are replaced by the weights.
        """
        shards = self._shards
        if shards is None or not self._swapped:
            return weights
        swapped_out = self._with_averaged_buffers(self._state_with(shards, list(self._inner.module.parameters())))
        numbers = self._index_by_id()
        named = self._module.named_parameters(remove_duplicate=False)
        have_masters = {name for name, parameter in named if shards.has_master(numbers[id(parameter)])}
        return {
            name: value if name in have_masters else swapped_out.get(name, value) for name, value in weights.items()
        }

    def _index_by_id(self) -> dict[int, int]:
        """Return the index in `WeightShards` of each parameter of the module, by the `id` of the parameter."""
        return {id(parameter): number for number, parameter in enumerate(self._module.parameters())}

    def _state_with(self, shards: WeightShards, values: list[Tensor]) -> dict[str, Any]:
        """Return the module's `state_dict` with `values`, this rank's shards, as its parameters."""
        numbers = self._index_by_id()

        def local_shard(parameter: Parameter) -> Tensor:
            number = numbers[id(parameter)]
            return shards.as_saved(number, values[number].detach())

        return sharded_state_dict(self._module, local_shard, self._save_frozen)

    def _with_averaged_buffers(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replace the buffers in `state` by their averages, in place, and return it."""
        buffers = {_memory_key(own): average for own, average in self._buffers()}
        for name, value in state.items():
            if isinstance(value, Tensor) and not is_sharded(value) and value.numel():
                state[name] = buffers.get(_memory_key(value), value)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of the averages in `state`. Before `attach`, postpone this until then."""
        if self._shards is None:
            self._state_to_read = state
            return
        if "n_averaged" in state and self.prefix:
            self.n_averaged.copy_(state["n_averaged"])
        named = dict(self._module.named_parameters(remove_duplicate=False))
        numbers = self._index_by_id()
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
        for average, current in self._pairs(self._require_shards()):
            average.copy_(current)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and buffers with their averages. Call it before and after an evaluation. *Collective*."""
        shards = self._require_shards()
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
        """Set the weights of the module to the averages, and its buffers as well if `buffers`. *Collective*."""
        shards = self._require_shards()
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
        return _ShardView(self._require_shards().current(), self._module)

    def _require_shards(self) -> WeightShards:
        if self._shards is None:
            raise ConfigurationError("Averages of weights exist only during trainer.fit, after the strategy's setup.")
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
        if self._rank_zero_buffers is not None and not self._swapped:
            self._rank_zero_buffers.broadcast_averages(self._inner.module)


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
    """What averaging functions read of a module: the shards as its parameters, and its buffers."""

    def __init__(self, shards: list[Tensor], module: Module) -> None:
        self._shards = shards
        self._module = module

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._shards)

    def buffers(self) -> Iterator[Tensor]:
        return self._module.buffers()


def _memory_key(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
