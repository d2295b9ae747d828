"""Check that the ranks of a run do not differ: settings, parameters, optimizers, steps, and values of replicas."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_paral.compat.lightning.callbacks import change_monitored, restore_monitored
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.torch.ddp import ignored_by_ddp
from lightning_paral.distributed.divergence import EpochAgreement, ReplicaCheck
from lightning_paral.distributed.exchange import Facts, check_same
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ConfigurationError
from lightning_paral.strategies.description import StrategyDescription

_SAME_SETTINGS = "They decide which collectives a rank calls. Give all ranks the same settings."
_SAME_MODULE = (
    "All ranks train the same module. Create it in the same way on all ranks: not from data, files or environment "
    "variables that differ between them."
)
_SAME_OPTIMIZERS = (
    "Ranks whose optimizers differ would end up with different weights. Return the same optimizers and learning rate "
    "schedulers from configure_optimizers on all ranks."
)
_SAME_HYPER_PARAMETERS = (
    "Since training began, they have been changed in different ways, and so the weights differ as well. If a scheduler "
    "such as ReduceLROnPlateau monitors a value, log it with sync_dist=True, so that it is equal on all ranks."
)


_OF_THE_TRAINER = (
    *("precision", "min_epochs", "max_epochs", "min_steps", "max_steps", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "check_val_every_n_epoch", "val_check_interval"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("num_sanity_val_steps", "overfit_batches", "fast_dev_run", "reload_dataloaders_every_n_epochs"),
)


class RankAgreement(StrategyDescription):
    """Mixin, placed before the Lightning base: a difference between ranks is an error that names it."""

    divergence_check_every: int | None = None
    """The option `divergence_check_every`: after how many optimizer steps replicas are compared; `None`: never."""
    _watcher: RankWatcher | None = None
    _steps: EpochAgreement | None = None
    """During a fit with several ranks."""
    _replica_check: ReplicaCheck | None = None
    """During a fit with several ranks and the option `divergence_check_every`."""
    _undo_agreement: ExitStack | None = None

    def _check_same_settings(self, trainer: Trainer) -> None:
        """Check that the ranks have the same settings of the Trainer. *Collective* over the world.

        Raises:
            ConfigurationError: they differ.
        """
        if self.dims.num_ranks > 1:
            check_same(_facts_of_run(trainer, self), _SAME_SETTINGS)

    def _check_same_module(self) -> None:
        """Check that the ranks have modules of the same structure. *Collective* over the world.

        Call this before the first collective that assumes it.

        Raises:
            ConfigurationError: they differ.
        """
        if len(self.dims.stage_ranks) == 1:
            return
        assert self.lightning_module is not None
        facts = _facts_of_tensors(
            self.lightning_module,
            trains=self._is_fit,
            shares_buffers=self._is_fit and self._broadcasts_buffers,
            shape_of=self._full_shape,
        )
        check_same(facts, _SAME_MODULE, self.dims.stage_group())

    def _check_same_optimizers(self) -> None:
        """Check that the ranks have the same optimizers and schedulers. *Collective* over the world.

        Raises:
            ConfigurationError: they differ.
        """
        if len(self.dims.stage_ranks) > 1:
            facts = _facts_of_optimizers(self.optimizers, self.lr_scheduler_configs, self.lightning_module)
            check_same(facts, _SAME_OPTIMIZERS, self.dims.stage_group())

    def _check_same_hyper_parameters(self) -> None:
        """Check that the learning rates and other hyper-parameters are still equal. *Collective* over the world.

        Raises:
            ConfigurationError: they differ.
        """
        if len(self.dims.stage_ranks) > 1:
            facts = _facts_of_optimizers(self.optimizers, self.lr_scheduler_configs, None)
            check_same(facts, _SAME_HYPER_PARAMETERS, self.dims.stage_group())

    @property
    def _broadcasts_buffers(self) -> bool:
        """Whether buffers are broadcast during a fit, so that all ranks must have the same ones."""
        return self.shares_buffers

    @staticmethod
    def _full_shape(tensor: Any) -> Any:
        """Return the full shape of a parameter or buffer, which may be sharded."""
        return tensor.shape

    @staticmethod
    def _is_sharded(parameter: Any) -> bool:
        """Return whether ranks hold different parts of a parameter."""
        return False

    def _replicas(self) -> dict[str, tuple[Tensor, int]]:
        """Return by name the tensors of which other ranks hold replicas, each with a number: 0 if it is in full.

        Tensors of ranks with the same name and number must be equal after each optimizer step.
        """
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters()
        return {name: (parameter, 0) for name, parameter in named if not self._is_sharded(parameter)}

    def hear_signal(self, signum: int, call: Callable[[], None]) -> None:
        """Call `call` in a thread after each signal `signum`, even if the main thread waits in a collective.

        Does nothing outside of a run with several ranks.
        """
        if self._watcher is not None:
            self._watcher.hear(signum, call)

    def _begin_agreement(self, trainer: Trainer) -> None:
        """Compare the ranks until `_end_agreement`. *Collective* over the world."""
        self._undo_agreement = ExitStack()
        if not self._is_fit or self._watcher is None:
            return
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        self._steps = EpochAgreement(self._watcher, timeout, lambda: batches.started)
        self._watcher.add(self._steps)
        end_epoch = trainer.fit_loop.on_advance_end

        def agree_and_end_epoch() -> None:
            self._agree_on_end_of_epoch(trainer)
            end_epoch()

        shadow_method(trainer.fit_loop, "on_advance_end", agree_and_end_epoch, self._undo_agreement)
        if self.divergence_check_every is not None:
            self._replica_check = ReplicaCheck(self.divergence_check_every, self._replicas, self.dims)

    def _end_agreement(self) -> None:
        if self._watcher is not None and self._steps is not None:
            self._watcher.remove(self._steps)
        if self._undo_agreement is not None:
            self._undo_agreement.close()
        self._steps = self._replica_check = self._undo_agreement = None

    def _agree_on_end_of_epoch(self, trainer: Trainer) -> None:
        if self._steps is not None:
            self._steps.end_epoch(trainer.current_epoch)
            self._check_same_hyper_parameters()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers and schedulers. *Collective* over the world.

        Raises:
            ConfigurationError: the ranks have different optimizers or schedulers.
        """
        super().setup_optimizers(trainer)
        self._check_same_optimizers()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step.

        Raises:
            ConfigurationError: under automatic optimization, the step returned `None`.
        """
        output = super().training_step(*args, **kwargs)
        if output is None and self.dims.num_ranks > 1:
            module = self.lightning_module
            assert module is not None
            if module.automatic_optimization:
                loop = module.trainer.fit_loop.epoch_loop
                raise ConfigurationError(
                    f"training_step returned None on rank {self.dims.rank}, for batch {loop.batch_idx} of epoch "
                    f"{module.trainer.current_epoch}. With several ranks no rank can skip a step, because gradients "
                    "are averaged over all of them. Return a loss that is zero instead, such as 0 * loss."
                )
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass."""
        if self._steps is not None and getattr(self.model, "require_backward_grad_sync", True):
            self._steps.backwards += 1
        return super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run an optimizer step; every `divergence_check_every` steps, compare replicas first. *Collective* if so.

        Raises:
            ConfigurationError: replicas of a parameter differ.
        """
        if self._replica_check is not None and self._steps is not None:
            # Before the next step: under ZeRO, the step gives all ranks the values of the owners of the shards.
            self._replica_check.after_step(self._steps.optimizer_steps)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._steps is not None:
            self._steps.optimizer_steps += 1
        return result


# What must be equal


def _facts_of_run(trainer: Trainer, strategy: Any) -> Facts:
    """Return the settings that decide which collectives a run has, and when."""
    facts = {("The function of the Trainer", "is"): str(trainer.state.fn), ("strategy", "is"): _name_of(strategy)}
    for name in ("strategy_name", "sampling", "_checkpoint_options", "divergence_check_every"):
        facts[f"The strategy's option {name.strip('_')}", "is"] = repr(getattr(strategy, name, None))
    for name in _OF_THE_TRAINER:
        facts[name, "is"] = str(getattr(trainer, name, None))
    for number, callback in enumerate([*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]):
        # of ModelCheckpoint: its class, what it monitors, and when it saves
        facts[f"Checkpoint or EarlyStopping callback {number}", "is"] = callback.state_key
    return facts


def _facts_of_tensors(module: Module, *, trains: bool, shares_buffers: bool, shape_of: Callable[[Any], Any]) -> Facts:
    """Return names, shapes and dtypes of the parameters and buffers that all ranks must have.

    Args:
        module: the module of the run.
        trains: whether the run is a fit, in which `requires_grad` matters.
        shares_buffers: whether buffers are broadcast.
        shape_of: returns the full shape of a parameter.
    """
    facts: dict[tuple[str, str], str] = {}
    ignored = ignored_by_ddp(module)
    for name, parameter in module.named_parameters():
        if name not in ignored:
            facts |= _facts_of_tensor(f"Parameter `{name}`", parameter, shape_of)
            if trains:
                facts[f"Parameter `{name}`", "has requires_grad"] = str(parameter.requires_grad)
    if shares_buffers:
        for name, buffer in module.named_buffers():
            if name not in ignored:
                facts |= _facts_of_tensor(f"Buffer `{name}`", buffer, shape_of)
    return facts


def _facts_of_optimizers(optimizers: Sequence[Any], schedulers: Sequence[Any], module: Module | None) -> Facts:
    """Return classes and hyper-parameters of the optimizers and schedulers, and the names of their parameters.

    Args:
        optimizers: the optimizers.
        schedulers: Lightning's configurations of the learning rate schedulers.
        module: the module that has the parameters; `None` leaves their names out.
    """
    names = {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}
    facts: dict[tuple[str, str], str] = {}
    for number, optimizer in enumerate(optimizers):
        subject = f"Optimizer {number}"
        facts[subject, "is"] = _name_of(optimizer)
        if not isinstance(optimizer, Optimizer):
            continue
        for index, group in enumerate(optimizer.param_groups):
            group_of = f"Param group {index} of optimizer {number} ({type(optimizer).__name__})"
            if module is not None:
                facts[group_of, "has parameters"] = ", ".join(names.get(id(p), "?") for p in group["params"])
            for key, value in sorted(_hyper_parameters(group).items()):
                facts[group_of, f"has {key}"] = value
    for number, config in enumerate(schedulers):
        subject = f"Learning rate scheduler {number}"
        facts[subject, "is"] = _name_of(getattr(config, "scheduler", config))
        for key in ("interval", "frequency", "monitor", "reduce_on_plateau"):
            facts[subject, f"has {key}"] = str(getattr(config, key, None))
    return facts


def _facts_of_tensor(subject: str, tensor: Tensor, shape_of: Callable[[Any], Any]) -> Facts:
    if is_lazy(tensor):
        return {(subject, "has shape"): "not yet known"}
    return {(subject, "has shape"): str(tuple(shape_of(tensor))), (subject, "has dtype"): str(tensor.dtype)}


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, str]:
    plain = (bool, int, float, str, type(None))
    values: dict[str, str] = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        parts = [
            each.item() if isinstance(each, Tensor) and each.numel() == 1 else each
            for each in (value if isinstance(value, tuple | list) else [value])
        ]
        if all(isinstance(each, plain) for each in parts):  # others may have a repr with their address
            values[key] = repr(parts if isinstance(value, tuple | list) else parts[0])
    return values


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# Values that callbacks monitor, which may be logged without `sync_dist`


def share_monitored(callbacks: Iterable[Callback], broadcast: Callable[[Any], Any], device: torch.device) -> None:
    """Let those `callbacks` that monitor a value use the values of rank 0.

    When such a callback considers a checkpoint, it calls `broadcast` once, which is collective.

    Args:
        callbacks: the callbacks. Only `ModelCheckpoint` and its subclasses change.
        broadcast: returns the object that rank 0 passes.
        device: where the values of rank 0 are needed.
    """
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and _uses_values(callback):
            change_monitored(callback, partial(_values_of_rank_0, broadcast=broadcast, device=device))


def restore_monitors(callbacks: Iterable[Callback]) -> None:
    """Undo `share_monitored`."""
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            restore_monitored(callback)


def _uses_values(callback: ModelCheckpoint) -> bool:
    """Return whether the checkpoints of `callback`, or the names of their files, depend on logged values."""
    return callback.monitor is not None or "{" in f"{callback.filename}{callback.CHECKPOINT_NAME_LAST}"


def _values_of_rank_0(values: dict[str, Any], broadcast: Callable[[Any], Any], device: torch.device) -> dict[str, Any]:
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}
    shared = broadcast(on_cpu)
    devices = {name: value.device for name, value in values.items() if isinstance(value, Tensor)}
    return {
        name: value.to(devices.get(name, device)) if isinstance(value, Tensor) else value
        for name, value in shared.items()
    }
