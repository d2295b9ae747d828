"""Follow the steps of a module on tensors without memory, to learn which layers need no collectives between them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_paral.compat.lightning.evaluation import evaluation_loaders
from lightning_paral.compat.lightning.strategies import training_loaders
from lightning_paral.compat.torch.modules import is_compiled
from lightning_paral.engines.tensor.planner.observations import Observations
from lightning_paral.engines.tensor.planner.trace import DataflowTrace, reason_of
from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.fake import FakeModule, StepSettings, call_step
from lightning_paral.planning.follow import IsolatedError, batch_of_loaders, run_isolated, settings_of

Batches = Mapping[str, Callable[[], Any]]
"""For each method of the module, such as `"validation_step"`: a function that returns a batch for each loader."""

_EVALUATION_STEPS: dict[Any, str] = {
    TrainerFn.FITTING: "validation_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def observe(
    module: LightningModule,
    batch: Any,
    settings: StepSettings,
    datamodule: LightningDataModule | None = None,
    *,
    num_ranks: int = 1,
    evaluations: Batches | None = None,
    is_set_up: bool = False,
    timeout: float = 300.0,
) -> Observations:
    """Follow a training step, and steps of evaluations, in a fork of this process.

    Nothing is proven if the training step cannot be followed, for example because it reads values of tensors. Frozen
    parameters count as learnable.

    Args:
        module: the module, which does not change. It may be on the meta device.
        batch: a batch, or a function that returns it and runs in the fork; `None` for evaluations alone.
        settings: the Trainer's settings.
        datamodule: what `trainer.datamodule` is in hooks.
        num_ranks: the number of tensor ranks. With 1, features are not followed into heads.
        evaluations: the batches of steps other than `training_step`, as lists with one batch for each loader.
        is_set_up: whether `setup` of the module has been called.
        timeout: seconds after which it is given up.
    """
    for name, part in module.named_modules():
        if is_compiled(part):
            return Observations(reason=f"{name or type(module).__name__} is compiled")

    def follow() -> Observations:
        follower = FakeModule(module, settings, datamodule, is_set_up=is_set_up)
        if not module.automatic_optimization and batch is not None:
            follower.configure_optimizers()
        return _follow(follower, batch, evaluations or {}, num_ranks)

    try:
        return run_isolated(follow, timeout)
    except IsolatedError as error:
        return Observations(reason=str(error).splitlines()[0])
    except ConfigurationError as error:
        return Observations(reason=str(error))


def observe_fit(
    trainer: Trainer,
    module: LightningModule,
    num_ranks: int,
    settings: StepSettings | None = None,
    *,
    timeout: float = 300.0,
) -> Observations:
    """Follow the training and validation steps of a fit in which the hooks `setup` have run.

    The first batches are drawn in a fork, so no random number of this process is drawn. Not collective: the ranks may
    observe different things if their batches or their code differ, so use the observations of one rank.

    Args:
        trainer: the Trainer.
        module: the module of the fit. It has not been wrapped.
        num_ranks: the number of tensor ranks.
        settings: the Trainer's settings, if they are not to be read from it.
        timeout: seconds after which it is given up.
    """
    evaluations: dict[str, Callable[[], Any]] = {}
    if trainer.enable_validation:
        evaluations["validation_step"] = lambda: first_batches(evaluation_loaders(trainer, TrainerFn.FITTING))
    return observe(
        module,
        lambda: batch_of_loaders(training_loaders(trainer)),
        settings or settings_of(trainer),
        vars(trainer).get("datamodule"),
        num_ranks=num_ranks,
        evaluations=evaluations,
        is_set_up=True,
        timeout=timeout,
    )


def observe_evaluation(
    trainer: Trainer,
    module: LightningModule,
    num_ranks: int,
    settings: StepSettings | None = None,
    *,
    timeout: float = 300.0,
) -> Observations:
    """Follow the step of `Trainer.validate`, `test` or `predict`, as `observe_fit` does.

    Args:
        trainer: the Trainer, in the run.
        module: the module of the run. It has not been wrapped.
        num_ranks: the number of tensor ranks.
        settings: the Trainer's settings, if they are not to be read from it.
        timeout: seconds after which it is given up.
    """
    function = trainer.state.fn
    assert function is not None
    return observe(
        module,
        None,
        settings or settings_of(trainer),
        vars(trainer).get("datamodule"),
        num_ranks=num_ranks,
        evaluations={_EVALUATION_STEPS[function]: lambda: first_batches(evaluation_loaders(trainer, function))},
        is_set_up=True,
        timeout=timeout,
    )


def first_batches(loaders: Any) -> list[Any]:
    """Return the first batch of each loader."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    return [batch_of_loaders(loader) for loader in (loaders if isinstance(loaders, list | tuple) else [loaders])]


def _follow(follower: FakeModule, batch: Any, evaluations: Batches, num_ranks: int) -> Observations:
    module: Any = follower.module
    # Batches are drawn before tensors lose their values, which samplers need.
    first = batch() if callable(batch) else batch
    drawn = {name: batches() for name, batches in evaluations.items()}
    # A callback may unfreeze parameters later. The gradient of one between two layers would then be a part of a sum.
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_()
    trace = DataflowTrace(module, num_ranks)

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with trace.suspended():
            torch.autograd.backward(loss, *args, **kwargs)

    with follower.mode, trace.following():
        follower.use_optimizers(backward)
        if first is not None:
            converted = follower.converted(first)
            try:
                with follower.trainer.precision_plugin.forward_context():
                    trace.run("training_step", lambda: call_step(module.training_step, converted))
            except Exception as error:
                return trace.observations(f"training_step cannot be followed: {reason_of(error)}")
        module.eval()
        for name, batches in drawn.items():
            _evaluate(follower, trace, name, batches)
    return trace.observations()


def _evaluate(follower: FakeModule, trace: DataflowTrace, name: str, batches: list[Any]) -> None:
    step = getattr(follower.module, name)
    for number, each in enumerate(batches):
        loader = number if len(batches) > 1 else None

        def call(batch: Any = each, loader: int | None = loader) -> Any:
            return call_step(step, follower.converted(batch), loader)

        with torch.no_grad(), follower.trainer.precision_plugin.forward_context():
            trace.run_until_error(name, call)
