"""Sharded averages of weights, in place of the full copy of the module that Lightning's callbacks keep."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.swa_utils import AveragedModel

from lightning_paral.averaging.buffers import share_averaged_buffers
from lightning_paral.checkpoint.lazy_tensor import read_into
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.state.weights import sharded_state_dict
from lightning_paral.errors import ConfigurationError


class Averages:
    """Averages this rank's shards, in place of the `AveragedModel` of a callback. torch's own code does the averaging.

    Created before the module is sharded; `attach` gives it the shards. After `end` it refers to the module itself: the
    averages are its weights then, or are lost if the fit ended early.

    Args:
        module: the LightningModule.
        save_frozen: whether checkpoints hold frozen parameters.
        device: where averages are kept; `None`: where the shards are.
        options: of `AveragedModel`.
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
        self._shares_buffers = False
        self._swapped = False
        self._is_kept = False
        self._state_to_read: Mapping[str, Any] | None = None

    def attach(self, shards: WeightShards, *, shares_buffers: bool) -> None:
        """Start the averages from the current weights.

        Args:
            shards: what this rank holds of them.
            shares_buffers: whether rank 0's buffers are evaluated on all ranks.
        """
        inner = AveragedModel(_Copied(shards.current(), self._module), self._device, **self._options)
        if self._device is None:
            inner.n_averaged = inner.n_averaged.cpu()
        inner.n_averaged.copy_(self._inner.n_averaged)
        self._inner, self._shards, self._shares_buffers = inner, shards, shares_buffers
        state, self._state_to_read = self._state_to_read, None
        if state is not None:
            self.load_state_dict(state)

    @property
    def is_attached(self) -> bool:
        """Whether there are averages of shards now."""
        return self._shards is not None

    @property
    def is_lost(self) -> bool:
        """Whether the fit ended before the averages became the module's weights."""
        return not self._is_kept

    def end(self) -> None:
        """Let go of the shards: the fit ends."""
        self._shards = None
        for name, _ in list(self._inner.module.named_parameters(recurse=False)):
            delattr(self._inner.module, name)

    # As AveragedModel

    @property
    def n_averaged(self) -> Tensor:
        """The number of updates so far."""
        return self._inner.n_averaged

    @property
    def module(self) -> Module:
        """The averages as a module: that of the shards during a fit, the LightningModule itself after it."""
        return self._inner.module if self.is_attached else self._module

    def update_parameters(self, module: Module) -> None:
        """Average in the weights as they are now. Nothing is sent."""
        self._inner.update_parameters(_View(self._attached().current(), module))  # type: ignore[arg-type]

    def to(self, device: Any) -> "Averages":
        """Move the averages to another device."""
        self._inner.module.to(device)
        return self

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name, tensors of true shapes of which this rank has a part.

        Raises:
            ConfigurationError: the fit ended before averages became the module's weights.
        """
        state = {self.prefix + name: value for name, value in self._weights().items()}
        return state | ({"n_averaged": self.n_averaged} if self.prefix else {})

    def _weights(self) -> dict[str, Any]:
        if self._shards is None:
            if self.is_lost:
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

        During an evaluation the module holds the averages; the weights that were put aside take their place here.
        """
        shards = self._shards
        if shards is None or not self._swapped:
            return weights
        put_aside = self._with_averaged_buffers(self._named(shards, list(self._inner.module.parameters())))
        numbers = self._numbers()
        named = self._module.named_parameters(remove_duplicate=False)
        have_masters = {name for name, parameter in named if shards.has_master(numbers[id(parameter)])}
        return {name: value if name in have_masters else put_aside.get(name, value) for name, value in weights.items()}

    def _numbers(self) -> dict[int, int]:
        """Return the numbers of the module's parameters in `WeightShards`, by their ids."""
        return {id(parameter): number for number, parameter in enumerate(self._module.parameters())}

    def _named(self, shards: WeightShards, values: list[Tensor]) -> dict[str, Any]:
        """Return what the module's `state_dict` does, with `values` of the parameters."""
        numbers = self._numbers()

        def held(parameter: Parameter) -> Tensor:
            number = numbers[id(parameter)]
            return shards.as_saved(number, values[number].detach())

        return sharded_state_dict(self._module, held, self._save_frozen)

    def _with_averaged_buffers(self, state: dict[str, Any]) -> dict[str, Any]:
        buffers = {_place(own): average for own, average in self._buffers()}
        for name, value in state.items():
            if isinstance(value, Tensor) and not is_sharded(value) and value.numel():
                state[name] = buffers.get(_place(value), value)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over averages from `state`, of which this rank reads what it holds."""
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
        self._share_buffers()
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
            self._share_buffers()
        for average, current in self._pairs(shards, buffers=buffers):
            current.copy_(average)
        shards.keep()
        shards.publish(borrowed=False)
        self._is_kept = True

    def current_view(self) -> Any:
        """Return a stand-in for the module whose parameters are the current shards."""
        return _View(self._attached().current(), self._module)

    def _attached(self) -> WeightShards:
        if self._shards is None:
            raise ConfigurationError("Averages of weights exist during trainer.fit only, from the strategy's setup on.")
        return self._shards

    def _pairs(self, shards: WeightShards, *, buffers: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each average with the tensor that it averages. Both can be written to."""
        averages = (parameter.detach() for parameter in self._inner.module.parameters())
        yield from zip(averages, shards.current(), strict=True)
        if buffers:
            yield from ((average, own.detach()) for own, average in self._buffers())

    def _buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self._module.buffers(), self._inner.module.buffers(), strict=True)

    def _share_buffers(self) -> None:
        if self._shares_buffers and not self._swapped:
            share_averaged_buffers(self._module, self._inner.module)


class CopiedAverages(Averages):
    """Takes the place of the copy of the module that `StochasticWeightAveraging` keeps."""

    prefix = ""

    def parameters(self) -> Iterator[Parameter]:
        """Return this rank's shards of the averages."""
        return self._inner.module.parameters()


class _Copied(Module):
    """A module of the shards, to be copied."""

    def __init__(self, shards: list[Tensor], module: Module) -> None:
        super().__init__()
        for number, shard in enumerate(shards):
            self.register_parameter(f"shard_{number}", Parameter(shard, requires_grad=False))
        for number, buffer in enumerate(module.buffers()):
            self.register_buffer(f"buffer_{number}", buffer.detach())


class _View:
    """What averaging looks at in a module: its parameters, which are the shards, and its buffers."""

    def __init__(self, shards: list[Tensor], module: Module) -> None:
        self._shards = shards
        self._module = module

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._shards)

    def buffers(self) -> Iterator[Tensor]:
        return self._module.buffers()


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape
