"""Create the topic that names the ranks that hang in a run, and where they are."""

from datetime import timedelta
from functools import partial

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer

from lightning_paral.distributed.hangs.stacks import StackRequests


def hang_requests(
    trainer: Trainer, timeout: timedelta, option: str, environment: ClusterEnvironment | None
) -> StackRequests:
    """Return the topic by which the ranks of a run tell each other where they are.

    Args:
        trainer: the Trainer of the run.
        timeout: the timeout of collectives.
        option: the name of the option that sets it.
        environment: the cluster environment. SIGUSR2 is not taken if SLURM sends it to requeue the job.
    """
    requeue = getattr(environment, "requeue_signal", None)
    return StackRequests(
        timeout, option, partial(_num_batches, trainer), takes_signal=getattr(requeue, "name", "") != "SIGUSR2"
    )


def _num_batches(trainer: Trainer) -> int:
    """Return how many batches and steps the loops of `trainer` have begun."""
    epoch = trainer.fit_loop.epoch_loop
    loops = (epoch, epoch.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return trainer.global_step + sum(loop.batch_progress.total.ready for loop in loops)
