"""Averages of weights (EMA, SWA) as shards, in place of the full copy of the module that Lightning's callbacks keep."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.swa_utils import AveragedModel

from lightning_paral.checkpoint.lazy_tensor import read_into
from lightning_paral.checkpoint.sharded_state import WeightShards
from lightning_paral.checkpoint.shards import is_sharded
from lightning_paral.checkpoint.tree import CURRENT_KEY
from lightning_paral.checkpoint.weights import sharded_state_dict
from lightning_paral.compat.lightning.callbacks import COPY, SWAP, averages_of, options_of, set_averages
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.buffers import RankZeroBuffers

LoadWeights = Callable[[Mapping[str, Any], bool], None]
"""Loads weights, and no averages. Takes a checkpoint, and whether its keys must match the module exactly."""


class ShardedAverages:
    """Averages this rank's shards of the weights. A callback uses it like an `AveragedModel` of the full module.

    It is created before the module is sharded, and `attach` gives it the shards. After `end`, it refers to the module
    itself, whose weights are now the averages. If the fit ended before `become_weights`, the averages are lost.

    Args:
        module: the LightningModule.
        save_frozen: whether checkpoints hold frozen parameters.
        prefix: what the names of weights begin with in the state dict; empty for a copy of the module.
        options: options of the `AveragedModel` that averages the shards, such as the `device` of the averages.
    """

    def __init__(self, module: LightningModule, save_frozen: bool, prefix: str = "module.", **options: Any) -> None:
        self._own, self._save_frozen, self._prefix, self._options = module, save_frozen, prefix, options
        self.module: Module = module
        """The averages: this rank's shards and all buffers during a fit, the LightningModule before and after it."""
        self.n_averaged = torch.tensor(0, dtype=torch.long)
        """The number of updates so far."""
        self.is_lost = True
        """Whether the averages have not become the weights of the module."""
        self._inner: Any = None
        self.shards: WeightShards | None = None
        """This rank's shards of the weights, from `attach` to `end`."""
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
        self._inner = AveragedModel(current, **self._options)  # copies them
        self._inner.n_averaged = self.n_averaged
        self.module, self.shards, self._buffers = self._inner.module, shards, buffers
        if self._state_to_read is not None:
            self.load_state_dict(self._state_to_read)
            self._state_to_read = None

    def end(self) -> None:
        """Release the shards and their averages. Call it at the end of the fit."""
        self.module, self._inner, self.shards = self._own, None, None

    # Interface of AveragedModel, and of the copy that StochasticWeightAveraging keeps

    def parameters(self) -> Iterator[Parameter]:
        """Return this rank's shards of the averages."""
        return self.module.parameters()

    def update_parameters(self, module: Module) -> None:
        """Update the averages with the current weights. No collective."""
        self._inner.update_parameters(self.current_view())

    def current_view(self) -> Any:
        """Return an object whose `parameters()` are the current shards, in place of a module."""
        current = self._attached().current()
        return SimpleNamespace(parameters=lambda: iter(current), buffers=self._own.buffers)

    def to(self, device: Any) -> "ShardedAverages":
        """Move the averages to another device."""
        if self.shards is not None:
            self.module.to(device)
        return self

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name, as tensors of the full shape that hold this rank's shard."""
        if self.shards is None:
            state: dict[str, Any] = self._own.state_dict()
        elif self._is_swapped:
            state = self._state_with(self.shards.current())
        else:
            state = self._state_of_averages()
        named = {self._prefix + name: value for name, value in state.items()}
        return named | ({"n_averaged": self.n_averaged} if self._prefix else {})

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of the averages in `state`. Before `attach`, postpone this until then."""
        if self.shards is None:
            self._state_to_read = state
            return
        if self._prefix:
            self.n_averaged.copy_(state["n_averaged"])
        numbers, averages = self._numbers(), dict(enumerate(self.parameters()))
        for name, parameter in self._own.named_parameters(remove_duplicate=False):
            number = numbers[id(parameter)]
            if self._prefix + name in state and number in averages:
                self.shards.read(number, state[self._prefix + name], averages.pop(number).detach())
        for (name, _), average in zip(self._own.named_buffers(), self.module.buffers(), strict=True):
            if self._prefix + name in state:
                read_into(state[self._prefix + name], average)

    @torch.no_grad()
    def weights_to_save(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the weights for a checkpoint, in place of the averages that the module holds during an evaluation.

        Args:
            weights: the module's `state_dict`.
        """
        if not (self._is_swapped and self.shards is not None):
            return weights
        numbers, swapped_out = self._numbers(), self._state_of_averages()
        named = self._own.named_parameters(remove_duplicate=False)
        masters = {name for name, parameter in named if self.shards.has_master(numbers[id(parameter)])}
        return {name: value if name in masters else swapped_out.get(name, value) for name, value in weights.items()}

    def _state_of_averages(self) -> dict[str, Any]:
        state = self._state_with([average.detach() for average in self.parameters()])
        # By memory, because a module may give its buffers other names in its state dict.
        averages = {(own.data_ptr(), own.shape): average for average, own in self._pairs(parameters=False)}
        for name, value in state.items():
            if isinstance(value, Tensor) and not is_sharded(value) and value.numel():
                state[name] = averages.get((value.data_ptr(), value.shape), value)
        return state

    def _state_with(self, values: list[Tensor]) -> dict[str, Any]:
        """Return the module's `state_dict` with `values`, this rank's shards, as its parameters."""
        numbered = dict(zip(map(id, self._own.parameters()), enumerate(values), strict=True))
        return sharded_state_dict(
            self._own, lambda parameter: self._attached().as_saved(*numbered[id(parameter)]), self._save_frozen
        )

    def _numbers(self) -> dict[int, int]:
        """Return the index in `WeightShards` of each parameter of the module, by the `id` of the parameter."""
        return {id(parameter): number for number, parameter in enumerate(self._own.parameters())}

    # Weights

    @torch.no_grad()
    def take_current(self) -> None:
        """Set the averages to the current weights and buffers."""
        for average, current in self._pairs():
            average.copy_(current)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and buffers with their averages. Call it before and after an evaluation. *Collective*."""
        shards = self.shards
        if shards is None:  # the averages are the weights
            return
        shards.prepare()
        self._broadcast_buffers()
        for average, current in self._pairs():
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
        for average, current in self._pairs(buffers=buffers):
            current.copy_(average)
        shards.keep()
        shards.publish(borrowed=False)
        self.is_lost = False

    def _attached(self) -> WeightShards:
        assert self.shards is not None, "averages exist only during trainer.fit, after the strategy's setup"
        return self.shards

    def _pairs(self, *, parameters: bool = True, buffers: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of each average, and that of the weight; then buffers. All are writable."""
        if parameters:
            averages = (average.detach() for average in self.parameters())
            yield from zip(averages, self._attached().current(), strict=True)
        if buffers:
            yield from zip(self.module.buffers(), (own.detach() for own in self._own.buffers()), strict=True)

    def _broadcast_buffers(self) -> None:
        if self._buffers is not None and not self._is_swapped:
            self._buffers.broadcast_averages(self.module)


class RunAverages:
    """The averages of weights that callbacks keep during one run of a strategy that shards the weights.

    Lightning's callbacks copy the module before it is sharded, and their methods use full parameters. During the run,
    methods of both classes are replaced by ones that use `ShardedAverages`. The averaging function must be elementwise.

    The strategy creates it before callbacks are set up, and calls `attach` once the module is sharded, `load` whenever
    it loads a checkpoint, and `end` in its teardown.

    Args:
        trainer: the trainer whose callbacks may average weights.
        save_frozen: whether checkpoints include frozen parameters.
        obstacle: why this strategy cannot average weights; `None` if it can.

    Raises:
        ConfigurationError: weights cannot be averaged, or a subclass overrides a method that has to be replaced.
    """

    def __init__(self, trainer: Trainer, *, save_frozen: bool, obstacle: str | None) -> None:
        self._trainer, self._save_frozen = trainer, save_frozen
        callbacks: list[Any] = vars(trainer)["callbacks"]
        found = [each for each in callbacks if isinstance(each, WeightAveraging | StochasticWeightAveraging)]
        self._callbacks = found if trainer.state.fn == TrainerFn.FITTING else []
        self._made: list[tuple[Callback, ShardedAverages]] = []
        self._pending: tuple[Mapping[str, Any], bool] | None = None
        self._undo = ExitStack()
        if self._callbacks and obstacle is not None:
            raise ConfigurationError(f"{type(self._callbacks[0]).__name__} cannot be used here: {obstacle}")
        for callback in self._callbacks:
            _check(callback)
        if found:
            self._replace_methods()

    def attach(
        self, make_shards: Callable[[], WeightShards], buffers: RankZeroBuffers | None, load_weights: LoadWeights
    ) -> None:
        """Start averaging. *Collective* over the world if there are averaging callbacks.

        Args:
            make_shards: returns this rank's shards; called only if there are averaging callbacks.
            buffers: broadcasts rank 0's averages of buffers, as it does rank 0's buffers; `None` if each rank
                keeps its own.
            load_weights: loads the weights of a checkpoint that was loaded before this call.

        Raises:
            ConfigurationError: a callback keeps a full copy of the module.
        """
        shards = make_shards() if self._callbacks else None
        for callback in self._callbacks:
            averages = averages_of(callback)
            if not isinstance(averages, ShardedAverages) or shards is None:
                raise ConfigurationError(
                    f"{type(callback).__name__} copies the full module in its own setup, but ranks hold shards of it. "
                    "Call super().setup(trainer, pl_module, stage) there, or use paral_ddp."
                )
            averages.attach(shards, buffers)
        pending, self._pending = self._pending, None
        if pending is not None:
            self.load(*pending, load_weights)

    def load(self, checkpoint: Mapping[str, Any], strict: bool, load_weights: LoadWeights) -> None:
        """Set the averages to the module's weights, into which the `state_dict` of `checkpoint` has just been loaded.

        If that entry holds averages, the checkpoint holds the weights under another key: load these afterwards. A call
        before `attach` is postponed until `attach`.
        """
        in_state_dict = [each for callback, each in self._made if isinstance(callback, WeightAveraging)]
        if any(averages.shards is None for averages in in_state_dict):
            self._pending = checkpoint, strict
            return
        for averages in in_state_dict:
            averages.take_current()
        if in_state_dict and CURRENT_KEY in checkpoint:
            load_weights({**checkpoint, "state_dict": checkpoint[CURRENT_KEY]}, strict)

    def end(self) -> None:
        """Restore Lightning's classes. Averages that have not become the module's weights are lost."""
        self._undo.close()
        for callback, averages in self._made:
            if averages.shards is not None and averages.is_lost:
                rank_zero_warn(
                    f"The fit ended before the averages of {type(callback).__name__} became the weights of the "
                    "module. They were sharded and are lost; checkpoints of the fit contain them."
                )
                set_averages(callback, None)
            averages.end()
        self._made = []

    def _replace_methods(self) -> None:
        """Make both classes use `ShardedAverages` where they use full weights."""
        save, update = WeightAveraging.on_save_checkpoint, StochasticWeightAveraging.update_parameters
        load = StochasticWeightAveraging.load_state_dict

        def on_save_checkpoint(callback: Any, trainer: Trainer, module: LightningModule, checkpoint: Any) -> None:
            checkpoint["state_dict"] = averages_of(callback).weights_to_save(checkpoint["state_dict"])
            save(callback, trainer, module, checkpoint)

        def on_load_checkpoint(callback: Any, trainer: Trainer, module: LightningModule, checkpoint: Any) -> None:
            # The strategy sets the averages to the loaded weights when it loads the weights of the module.
            if CURRENT_KEY in checkpoint and "averaging_state" in checkpoint:
                averages_of(callback).n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])

        def load_state_dict(callback: Any, state_dict: dict[str, Any]) -> None:
            # Its `on_fit_start`, which has run, would have replaced the schedulers.
            if state_dict["scheduler_state"] is not None and self._trainer.strategy.restore_checkpoint_after_setup:
                raise ConfigurationError(
                    "StochasticWeightAveraging cannot resume after swa_epoch_start if the module is built in "
                    "configure_model, or under ZeRO with 16-bit weights. Build it in __init__, or use paral_fsdp."
                )
            load(callback, state_dict)

        replaced: dict[type[Callback], dict[str, Callable[..., None]]] = {
            WeightAveraging: {
                SWAP: lambda callback, module: averages_of(callback).swap(),
                COPY: lambda callback, module: averages_of(callback).become_weights(buffers=True),
                "on_save_checkpoint": on_save_checkpoint,
                "on_load_checkpoint": on_load_checkpoint,
            },
            StochasticWeightAveraging: {
                "update_parameters": lambda averages, _, *args: update(averages, averages.current_view(), *args),
                "transfer_weights": lambda averages, module: averages.become_weights(buffers=False),
                "load_state_dict": load_state_dict,
            },
        }
        for base, ours in replaced.items():
            methods = {name: _if_sharded(method, vars(base)[name]) for name, method in ours.items()}
            self._undo.callback(replace_attributes(base, {"setup": self._setup(base.setup), **methods}))

    def _setup(self, theirs: Callable[..., None]) -> Callable[..., None]:
        """Return a `setup` that makes sharded averages in place of a copy of the module."""

        def setup(callback: Any, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if trainer is not self._trainer:
                theirs(callback, trainer, pl_module, stage)
            elif stage == "fit":
                # Like Lightning's copy, the averages of SWA move to the callback's device at the first update.
                is_copy = not isinstance(callback, WeightAveraging)
                options = {"prefix": ""} if is_copy else options_of(callback, trainer, theirs)
                averages = ShardedAverages(pl_module, self._save_frozen, **options)
                self._made.append((callback, averages))
                set_averages(callback, averages)

        return setup


def _if_sharded(ours: Callable[..., None], theirs: Any) -> Any:
    """Return a method that calls `ours` if its first argument is, or is a callback that keeps, `ShardedAverages`."""
    function = theirs.__func__ if isinstance(theirs, staticmethod) else theirs

    @wraps(function)
    def method(first: Any, *args: Any, **keywords: Any) -> None:
        averages = averages_of(first) if isinstance(first, Callback) else first
        (ours if isinstance(averages, ShardedAverages) else function)(first, *args, **keywords)

    return staticmethod(method) if isinstance(theirs, staticmethod) else method


def _check(callback: Any) -> None:
    """Raise a `ConfigurationError` if a callback overrides a method that has to be replaced."""
    base = WeightAveraging if isinstance(callback, WeightAveraging) else StochasticWeightAveraging
    for method in (SWAP, COPY) if base is WeightAveraging else ("update_parameters", "transfer_weights"):
        if getattr(type(callback), method) is not getattr(base, method):
            named = f"{type(callback).__name__} overrides {method}"
            raise ConfigurationError(f"{named}, which needs full weights. Remove the override, or use paral_ddp.")


def forget_ended(callbacks: list[Any]) -> None:
    """Drop averages of a finished fit, so that evaluating a checkpoint uses the averages in its `state_dict`."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and isinstance(averages_of(callback), ShardedAverages):
            set_averages(callback, None)


def broadcast_when_swapped(buffers: RankZeroBuffers) -> Callable[[], None]:
    """Make `WeightAveraging` broadcast its averages of `buffers` at each swap; return a function that undoes this.

    For strategies whose ranks hold full weights, which Lightning averages itself.
    """
    swap = getattr(WeightAveraging, SWAP)

    def swap_models(callback: Any, pl_module: LightningModule) -> None:
        buffers.broadcast_averages(averages_of(callback).module)
        swap(callback, pl_module)

    return replace_attributes(WeightAveraging, {SWAP: swap_models})
