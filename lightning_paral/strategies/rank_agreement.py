"""Check that the ranks of a run do not differ: settings, parameters, optimizers and steps."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lightning_paral.compat.lightning.callbacks import change_monitored
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.torch.ddp import ignored_by_ddp
from lightning_paral.distributed.divergence import EpochAgreement
from lightning_paral.distributed.exchange import Facts, check_same
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ConfigurationError

_SAME_SETTINGS = "They decide which collectives a rank calls. Give all ranks the same settings."
_SAME_MODULE = (
    "All ranks train the same module. Create it in the same way on all ranks: not from data, files or environment "
    "variables that differ between them."
)
_SAME_OPTIMIZERS = (
    "Ranks whose optimizers differ would end up with different weights. Return the same optimizers from "
    "configure_optimizers on all ranks."
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


class RankAgreement:
    """The part of a strategy that makes a difference between ranks an error that names it.

    A strategy has one for all of its runs. Between `begin` and `end` there is a run.

    Args:
        strategy: the strategy, a `ParalStrategy`.
    """

    steps: EpochAgreement | None = None
    """During a fit with several ranks, what counts its steps and compares the counts at the end of each epoch."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def check_settings(self, trainer: Trainer) -> None:
        """Check that the ranks have the same settings of the Trainer. *Collective* over the world.

        Raises:
            ConfigurationError: they differ.
        """
        if self._strategy.dims.num_ranks > 1:
            check_same(_facts_of_run(trainer, self._strategy), _SAME_SETTINGS)

    def check_module(self, *, trains: bool) -> None:
        """Check that the ranks have modules of the same structure. *Collective* over the world.

        Call this before the first collective that assumes it.

        Args:
            trains: whether the run is a fit, in which `requires_grad` and buffers that are broadcast matter.

        Raises:
            ConfigurationError: they differ.
        """
        strategy = self._strategy
        if len(strategy.dims.stage_ranks) > 1:
            shares_buffers = trains and strategy.shares_buffers
            facts = _facts_of_tensors(strategy.lightning_module, trains, shares_buffers, strategy.full_shape)
            check_same(facts, _SAME_MODULE, strategy.dims.stage_group())

    def check_optimizers(self) -> None:
        """Check that the ranks have the same optimizers. *Collective* over the world.

        Raises:
            ConfigurationError: they differ.
        """
        self._check_optimizers(self._strategy.lightning_module, _SAME_OPTIMIZERS)

    def _check_optimizers(self, module: Module | None, remedy: str) -> None:
        strategy = self._strategy
        if len(strategy.dims.stage_ranks) > 1:
            facts = _facts_of_optimizers(strategy.optimizers, module)
            check_same(facts, remedy, strategy.dims.stage_group())

    def begin(self, trainer: Trainer, watcher: RankWatcher | None, undo: ExitStack) -> None:
        """Compare the ranks until `undo` is closed. *Collective* over the world.

        Args:
            trainer: the Trainer of the run.
            watcher: the watcher of the run; `None` if it has one rank.
            undo: undoes what this changes.
        """
        strategy = self._strategy
        if watcher is None:
            return
        share = partial(_values_of_rank_0, broadcast=strategy.broadcast, device=strategy.root_device)
        for callback in filter(_uses_values, trainer.checkpoint_callbacks):
            change_monitored(callback, share, undo)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        self.steps = steps = EpochAgreement(watcher, strategy.timeout, lambda: batches.started)
        watcher.add(steps)

        def forget() -> None:
            watcher.remove(steps)
            self.steps = None

        undo.callback(forget)
        end_epoch = trainer.fit_loop.on_advance_end

        def agree_and_end_epoch() -> None:
            steps.end_epoch(trainer.current_epoch)
            self._check_optimizers(None, _SAME_HYPER_PARAMETERS)
            end_epoch()

        shadow_method(trainer.fit_loop, "on_advance_end", agree_and_end_epoch, undo)


def skipped_step(trainer: Trainer, rank: int) -> ConfigurationError:
    """Return the error of a `training_step` that returned `None` on this rank."""
    return ConfigurationError(
        f"training_step returned None on rank {rank}, for batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch "
        f"{trainer.current_epoch}. With several ranks no rank can skip a step, because gradients are averaged over "
        "all of them. Return a loss that is zero instead, such as 0 * loss."
    )


# What must be equal


def _facts_of_run(trainer: Trainer, strategy: Any) -> Facts:
    """Return the settings that decide which collectives a run has, and when."""
    facts = {("The function of the Trainer", "is"): str(trainer.state.fn), ("strategy", "is"): _name_of(strategy)}
    for name in ("strategy_name", "sampling", "_checkpoint_options"):
        facts[f"The strategy's option {name.strip('_')}", "is"] = repr(getattr(strategy, name, None))
    for name in _OF_THE_TRAINER:
        facts[name, "is"] = str(getattr(trainer, name, None))
    for number, callback in enumerate([*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]):
        # of ModelCheckpoint: its class, what it monitors, and when it saves
        facts[f"Checkpoint or EarlyStopping callback {number}", "is"] = callback.state_key
    return facts


def _facts_of_tensors(module: Module, trains: bool, shares_buffers: bool, shape_of: Callable[[Any], Any]) -> Facts:
    """Return names, shapes and dtypes of the parameters and buffers that all ranks must have.

    Args:
        module: the module of the run.
        trains: whether the run is a fit, in which `requires_grad` matters.
        shares_buffers: whether buffers are broadcast.
        shape_of: returns the full shape of a parameter.
    """
    facts: dict[tuple[str, str], str] = {}
    ignored = ignored_by_ddp(module)
    tensors: list[tuple[str, str, Tensor]] = [("Parameter", *named) for named in module.named_parameters()]
    if shares_buffers:
        tensors += [("Buffer", *named) for named in module.named_buffers()]
    for kind, name, tensor in tensors:
        if name in ignored:
            continue
        subject = f"{kind} `{name}`"
        if is_lazy(tensor):
            facts[subject, "has shape"] = "not yet known"
        else:
            facts |= {(subject, "has shape"): str(tuple(shape_of(tensor))), (subject, "has dtype"): str(tensor.dtype)}
        if trains and isinstance(tensor, Parameter):
            facts[subject, "has requires_grad"] = str(tensor.requires_grad)
    return facts


def _facts_of_optimizers(optimizers: Sequence[Any], module: Module | None) -> Facts:
    """Return classes and hyper-parameters of the optimizers, and the names of their parameters.

    Args:
        optimizers: the optimizers.
        module: the module that has the parameters; `None` leaves their names out.
    """
    names = {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}
    facts: dict[tuple[str, str], str] = {}
    for number, optimizer in enumerate(optimizers):
        facts[f"Optimizer {number}", "is"] = _name_of(optimizer)
        for index, group in enumerate(getattr(optimizer, "param_groups", ())):
            group_of = f"Param group {index} of optimizer {number} ({type(optimizer).__name__})"
            if module is not None:
                facts[group_of, "has parameters"] = ", ".join(names.get(id(p), "?") for p in group["params"])
            for key in sorted(group.keys() - {"params", "param_names"}):
                plain = _plain(group[key])
                if plain is not None:
                    facts[group_of, f"has {key}"] = plain
    return facts


def _plain(value: Any) -> str | None:
    """Return a hyper-parameter as text; `None` if it is or contains an object, whose text may differ between ranks."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):
        parts = [_plain(each) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return repr(value) if isinstance(value, bool | int | float | str | None) else None


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# Values that callbacks monitor, which may be logged without `sync_dist`


def _uses_values(callback: Any) -> TypeGuard[ModelCheckpoint]:
    """Return whether the checkpoints of a callback, or the names of their files, depend on logged values."""
    if not isinstance(callback, ModelCheckpoint):
        return False
    return callback.monitor is not None or "{" in f"{callback.filename}{callback.CHECKPOINT_NAME_LAST}"


def _values_of_rank_0(values: dict[str, Any], broadcast: Callable[[Any], Any], device: torch.device) -> dict[str, Any]:
    """Return the values that rank 0 monitors, so that all ranks choose the same checkpoint. *Collective*."""
    return cast("dict[str, Any]", move_data_to_device(broadcast(move_data_to_device(values, "cpu")), device))
