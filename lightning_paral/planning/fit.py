"""Plan the fit that a Trainer is about to run."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_paral.compat.lightning.replaced_strategy import training_loaders
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import ActivationCheckpointing
from lightning_paral.planning.batch import batch_of_loaders, batch_size_of, resized
from lightning_paral.planning.estimate import Estimate, estimate
from lightning_paral.planning.following import FollowedSteps, follow_steps
from lightning_paral.planning.layout import Layout
from lightning_paral.planning.settings import StepSettings

_PATIENCE = timedelta(minutes=5)


def settings_of(trainer: Trainer) -> StepSettings:
    """Return the settings of a Trainer on which a plan depends."""
    return StepSettings(
        precision=str(trainer.precision),
        accumulate=trainer.accumulate_grad_batches,
        clip_value=trainer.gradient_clip_val or None,
    )


def follow_fit(
    trainer: Trainer,
    module: LightningModule,
    settings: StepSettings,
    *,
    num_parts: int = 1,
    checkpointing: ActivationCheckpointing | None = None,
    timeout: float = 300.0,
) -> FollowedSteps:
    """Follow a step of a fit in which the hooks `setup` have run, but the module has not been wrapped.

    The first batch is drawn in the fork that follows the step, so that no random number of this process is drawn.

    Args:
        trainer: the Trainer.
        module: the module of the fit.
        settings: the Trainer's settings.
        num_parts: into how many parts a batch of the loader is divided, of which this rank or device gets one.
        checkpointing: what the strategy recomputes.
        timeout: seconds after which it is given up.

    Raises:
        ConfigurationError: the module cannot be planned.
    """

    def first_batch() -> Any:
        batch = batch_of_loaders(training_loaders(trainer))
        size = batch_size_of(batch)
        return batch if num_parts == 1 or size is None else resized(batch, -(-size // num_parts), size)

    return follow_steps(
        module,
        first_batch,
        settings,
        vars(trainer).get("datamodule"),
        is_set_up=True,
        checkpointing=checkpointing,
        timeout=timeout,
    )


@dataclass(frozen=True, kw_only=True)
class PlannedFit:
    """What a fit under the Trainer's own strategy costs."""

    estimate: Estimate
    notes: tuple[str, ...]
    """What was assumed, and what is not in the figures."""


def plan_fit(trainer: Trainer, module: LightningModule) -> PlannedFit:
    """Predict the costs of a fit under the strategy of the Trainer, which has begun, as in `follow_fit`.

    Not collective: one rank alone may call it. It takes at most half of the time that the others wait in a collective.

    Raises:
        ConfigurationError: the strategy or the module cannot be planned.
    """
    strategy: Any = trainer.strategy
    layout: Layout | None = getattr(strategy, "layout", None)
    if layout is None:
        raise ConfigurationError(f"{type(strategy).__name__} is not a strategy that can be planned")
    settings = settings_of(trainer)
    if layout.engine == "dp":
        num_ranks = num_parts = trainer.num_devices
    else:
        num_ranks = trainer.world_size
        num_parts = strategy.dims.data_size if strategy.sampling.split == "global" else 1
    patience = getattr(strategy, "timeout", _PATIENCE)
    followed = follow_fit(
        trainer,
        module,
        settings,
        num_parts=num_parts,
        checkpointing=strategy.activation_checkpointing,
        timeout=min(_PATIENCE, patience / 2).total_seconds(),
    )
    on_cpu = strategy.root_device.type == "cpu"
    costs = estimate(layout, followed.plain, followed.states, num_ranks, settings, on_cpu=on_cpu)
    uncounted = (f"Not counted: {', '.join(layout.uncounted)}.",) if layout.uncounted else ()
    return PlannedFit(estimate=costs, notes=(*followed.plain.notes, *uncounted))
