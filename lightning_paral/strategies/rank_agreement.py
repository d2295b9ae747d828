"""Check that the ranks of a run do not differ: settings, parameters, optimizers and steps."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from lightning_paral.compat.lightning.callbacks import change_monitored
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.distributed.divergence import EpochAgreement
from lightning_paral.distributed.exchange import Facts, check_same
from lightning_paral.distributed.watcher import RankWatcher

_SAME_SETTINGS = "They decide which collectives a rank calls. Give all ranks the same settings."
_SAME_MODULE = (
    "All ranks train the same module. Create it in the same way on all ranks: not from data, files or environment "
    "variables that differ between them."
)
_SAME_OPTIMIZERS = (
    "Ranks whose optimizers differ would end up with different weights. Return the same optimizers from "
    "configure_optimizers on all ranks. If a scheduler such as ReduceLROnPlateau monitors a value, log it with "
    "sync_dist=True."
)
_OF_THE_TRAINER = (
    *("precision", "min_epochs", "max_epochs", "min_steps", "max_steps", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "check_val_every_n_epoch", "val_check_interval"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("num_sanity_val_steps", "overfit_batches", "fast_dev_run", "reload_dataloaders_every_n_epochs"),
)


class RankAgreement:
    """The part of a strategy that makes a difference between ranks an error that names it.

    A strategy has one for all of its runs. Between `begin` and `end` there is a run. Each check raises a
    `ConfigurationError` on all ranks, and is *collective* over those that it compares.

    Args:
        strategy: the strategy, a `ParalStrategy`.
    """

    steps: EpochAgreement | None = None
    """During a fit with several ranks, what counts its steps and compares the counts at the end of each epoch."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def check_settings(self, trainer: Trainer) -> None:
        """Check that all ranks have the same settings of the Trainer."""
        if self._strategy.dims.num_ranks > 1:
            check_same(_facts_of_run(trainer, self._strategy), _SAME_SETTINGS)

    def check_module(self, *, trains: bool) -> None:
        """Check that the ranks of a stage have modules of the same structure.

        Call this before the first collective that assumes it.

        Args:
            trains: whether the run is a fit, in which `requires_grad` and buffers that are broadcast matter.
        """
        self._check(lambda: self._facts_of_tensors(trains), _SAME_MODULE)

    def check_optimizers(self) -> None:
        """Check that the ranks of a stage have the same optimizers, with the same hyper-parameters."""
        self._check(self._facts_of_optimizers, _SAME_OPTIMIZERS)

    def _check(self, facts: Callable[[], Facts], remedy: str) -> None:
        dims = self._strategy.dims
        if len(dims.stage_ranks) > 1:
            check_same(facts(), remedy, dims.stage_group())

    def begin(self, trainer: Trainer, watcher: RankWatcher, undo: ExitStack) -> None:
        """Compare the progress of the ranks until `undo` is closed. *Collective* over the world.

        Args:
            trainer: the Trainer of the run.
            watcher: the watcher of the run.
            undo: undoes what this changes.
        """
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and _uses_values(callback):
                change_monitored(callback, self._values_of_rank_0, undo)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        self.steps = steps = EpochAgreement(watcher, self._strategy.timeout, lambda: batches.started)
        watcher.add(steps)
        undo.callback(setattr, self, "steps", None)
        undo.callback(watcher.remove, steps)
        end_epoch = trainer.fit_loop.on_advance_end

        def agree_and_end_epoch() -> None:
            steps.end_epoch(trainer.current_epoch)
            self.check_optimizers()
            end_epoch()

        shadow_method(trainer.fit_loop, "on_advance_end", agree_and_end_epoch, undo)

    def _values_of_rank_0(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values that rank 0 monitors, so that all ranks choose the same checkpoint. *Collective*."""
        shared: dict[str, Any] = self._strategy.broadcast(move_data_to_device(values, "cpu"))
        return move_data_to_device(shared, self._strategy.root_device)  # type: ignore[no-any-return]

    # What must be equal

    def _facts_of_tensors(self, trains: bool) -> Facts:
        """Return names, shapes and dtypes of the parameters and buffers that all ranks must have."""
        strategy, facts = self._strategy, dict[tuple[str, str], str]()
        module: Module = strategy.lightning_module
        tensors: list[tuple[str, Tensor]] = list(module.named_parameters())
        if trains and strategy.shares_buffers:
            tensors += module.named_buffers()
        full_shape = strategy._sharded_state.full_shape
        for name, tensor in tensors:
            is_parameter = isinstance(tensor, Parameter)
            subject = f"{'Parameter' if is_parameter else 'Buffer'} `{name}`"
            shape = "not yet known" if is_lazy(tensor) else str(full_shape(tensor))
            facts |= {(subject, "has shape"): shape, (subject, "has dtype"): str(tensor.dtype)}
            if trains and is_parameter:
                facts[subject, "has requires_grad"] = str(tensor.requires_grad)
        return facts

    def _facts_of_optimizers(self) -> Facts:
        """Return classes and hyper-parameters of the optimizers, and the names of their parameters."""
        names = {id(parameter): name for name, parameter in self._strategy.lightning_module.named_parameters()}
        facts: dict[tuple[str, str], str] = {}
        for number, optimizer in enumerate(self._strategy.optimizers):
            facts[f"Optimizer {number}", "is"] = _name_of(optimizer)
            for index, group in enumerate(getattr(optimizer, "param_groups", ())):
                group_of = f"Param group {index} of optimizer {number} ({type(optimizer).__name__})"
                facts[group_of, "has parameters"] = ", ".join(names.get(id(p), "?") for p in group["params"])
                for key in sorted(group.keys() - {"params", "param_names"}):
                    plain = _plain(group[key])
                    if plain is not None:
                        facts[group_of, f"has {key}"] = plain
        return facts


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


def _uses_values(callback: ModelCheckpoint) -> bool:
    """Return whether the checkpoints of a callback, or the names of their files, depend on logged values."""
    return callback.monitor is not None or "{" in f"{callback.filename}{callback.CHECKPOINT_NAME_LAST}"
