"""The facts about a run that must be equal on all ranks: settings of the Trainer, tensors and optimizers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_paral.compat.torch.ddp_ignored import ignored_by_ddp

OwnFacts = dict[tuple[str, str], str]

_OF_THE_TRAINER = (
    *("precision", "min_epochs", "max_epochs", "min_steps", "max_steps", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "check_val_every_n_epoch", "val_check_interval"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("num_sanity_val_steps", "overfit_batches", "fast_dev_run", "reload_dataloaders_every_n_epochs"),
)
_OF_CALLBACKS = (
    *("monitor", "mode", "patience", "min_delta", "save_top_k", "save_last", "save_weights_only"),
    "every_n_epochs",
)


def facts_of_run(trainer: Trainer, strategy: Any) -> OwnFacts:
    """Return the settings that decide which collectives a run has, and when."""
    facts = {("The function of the Trainer", "is"): str(trainer.state.fn), ("strategy", "is"): _name_of(strategy)}
    for name in ("strategy_name", "sampling", "_checkpoint_options", "divergence_check_every"):
        facts[f"The strategy's option {name.strip('_')}", "is"] = repr(getattr(strategy, name, None))
    for name in _OF_THE_TRAINER:
        facts[name, "is"] = str(getattr(trainer, name, None))
    callbacks = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
    for number, callback in enumerate(callbacks):
        subject = f"{'EarlyStopping' if isinstance(callback, EarlyStopping) else 'Checkpoint'} callback {number}"
        facts[subject, "is"] = callback.state_key  # of ModelCheckpoint: its class, and when it saves
        facts |= {
            (f"{name.strip('_')} of {type(callback).__name__}", "is"): str(vars(callback)[name])
            for name in _OF_CALLBACKS
            if name in vars(callback)
        }
    return facts


def facts_of_tensors(module: Module, *, trains: bool, shares_buffers: bool, shape_of: Callable[[Any], Any]) -> OwnFacts:
    """Return names, shapes and dtypes of the parameters and buffers that all ranks must have.

    Args:
        module: the module of the run.
        trains: whether the run is a fit, in which `requires_grad` matters.
        shares_buffers: whether buffers are broadcast.
        shape_of: returns the full shape of a parameter.
    """
    facts: OwnFacts = {}
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


def facts_of_optimizers(optimizers: Sequence[Any], schedulers: Sequence[Any], module: Module | None) -> OwnFacts:
    """Return classes and hyper-parameters of the optimizers and schedulers, and the names of their parameters.

    Args:
        optimizers: the optimizers.
        schedulers: Lightning's configurations of the learning rate schedulers.
        module: the module that has the parameters; `None` leaves their names out.
    """
    names = {} if module is None else {id(parameter): name for name, parameter in module.named_parameters()}
    facts: OwnFacts = {}
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


def _facts_of_tensor(subject: str, tensor: Tensor, shape_of: Callable[[Any], Any]) -> OwnFacts:
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
