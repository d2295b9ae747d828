"""Count the floating-point operations of each unit in a training step, before the fit."""

from collections.abc import Iterable, Sequence

from lightning.pytorch import LightningModule, Trainer

from lightning_paral.compat.lightning.replaced_strategy import training_loaders
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import ActivationCheckpointing
from lightning_paral.planning.batch import batch_of_loaders
from lightning_paral.planning.cpu_flops import register_cpu_kernels
from lightning_paral.planning.fake_step import StepFollower
from lightning_paral.planning.isolated import IsolatedError, run_isolated
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.timeline import Kind, Moment, PlannedUnit


def count_unit_flops(
    trainer: Trainer,
    module: LightningModule,
    names: Sequence[str],
    *,
    checkpointing: ActivationCheckpointing | None = None,
    timeout: float = 300.0,
) -> list[int]:
    """Return the operations of each unit of a chain in the forward and backward pass of a step.

    The step of the first batch runs on tensors without memory, in a fork of this process, so the counts do not depend
    on the machine. Matrix products, convolutions, attention and LSTMs are counted. What runs after a unit counts with
    it. The first unit also counts with the backward pass of what runs before it, whose forward pass is not counted.

    Args:
        trainer: a Trainer that is about to fit: the hooks `setup` have run, but the module has not been wrapped.
        module: the module of the fit. Its parameters may be on any device, including meta.
        names: the dotted names of the units, which are called in this order.
        checkpointing: the units whose activations are recomputed.
        timeout: seconds after which it is given up.

    Raises:
        ConfigurationError: the step cannot be followed, or has no counted operation in a unit.
    """

    def count() -> list[int]:
        register_cpu_kernels()  # in the fork only
        follower = StepFollower(
            module, StepSettings(precision=str(trainer.precision)), vars(trainer).get("datamodule"), is_set_up=True
        )
        follower.units = tuple(PlannedUnit(name=name, parameters=()) for name in (*names, ""))
        follower.configure_optimizers()
        timeline = follower.follow(batch_of_loaders(training_loaders(trainer)), checkpointing)
        return flops_of_units(timeline.moments, len(names))

    try:
        flops = run_isolated(count, timeout)
    except IsolatedError as error:
        raise ConfigurationError(f"the training step cannot be followed on tensors without values: {error}") from error
    if not any(flops):
        raise ConfigurationError("none of the units has a matrix product, a convolution or attention")
    return flops


def flops_of_units(moments: Iterable[Moment], num_units: int) -> list[int]:
    """Return the operations of each unit in a step.

    Args:
        moments: the moments of the step, in which the root is unit `num_units`.
        num_units: the number of units, which are called one after the other.
    """
    flops = [0] * num_units
    current: int | None = None
    in_backward = False
    for kind, size, number in moments:
        if kind is Kind.COMPUTE and current is not None:
            flops[current] += size
        elif kind is Kind.BACKWARD:
            in_backward, current = True, num_units - 1
        elif kind is Kind.ENTER_BACKWARD and number < num_units:
            current = number
        elif kind is Kind.ENTER_FORWARD and number == num_units:
            in_backward, current = False, None
        elif kind is Kind.ENTER_FORWARD and not in_backward:
            current = number
        elif kind is Kind.OPTIMIZER:
            current = None
    return flops
