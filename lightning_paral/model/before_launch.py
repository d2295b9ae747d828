"""Check a module before the other processes start, so that one process reports the error."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_paral.model.activation_checkpointing import checkpointed_units
from lightning_paral.model.units import choose_units


def check_before_launch(strategy: Any, trainer: Trainer) -> None:
    """Raise a `ConfigurationError` if the module lacks units that the strategy's options name.

    A module that is built in `configure_model` or `setup` is checked after that, on every rank.
    """
    module = strategy.lightning_module
    if module is None or trainer.state.fn != TrainerFn.FITTING or _is_built_later(module, trainer):
        return
    checkpointing = getattr(strategy, "_activation_checkpointing", None)
    if checkpointing is not None:
        checkpointed_units(module, checkpointing)
    units, min_params = getattr(strategy, "_units", "auto"), getattr(strategy, "_min_params", None)
    if units != "auto" or min_params is not None:
        choose_units(module, units, min_params, children=not module.automatic_optimization)


def _is_built_later(module: LightningModule, trainer: Trainer) -> bool:
    if any(is_overridden(hook, module) for hook in ("configure_model", "configure_sharded_model", "setup")):
        return True
    callbacks = vars(trainer)["callbacks"]
    return any(not type(callback).setup.__module__.startswith("lightning.") for callback in callbacks)
