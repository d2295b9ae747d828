"""Requeue jobs of SLURM."""

import logging
import os
import signal
import subprocess

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy

log = logging.getLogger(__name__)


def environment_of(trainer: Trainer) -> SLURMEnvironment | None:
    """Return the Trainer's environment if it is SLURM's."""
    strategy = trainer.strategy
    environment = strategy.cluster_environment if isinstance(strategy, ParallelStrategy) else None
    return environment if isinstance(environment, SLURMEnvironment) else None


def requeues(trainer: Trainer) -> bool:
    """Return whether the job is to be requeued automatically."""
    environment = environment_of(trainer)
    return environment is not None and environment.auto_requeue


def requeue_signal(trainer: Trainer) -> signal.Signals:
    """Return the signal by which SLURM asks a job to requeue itself; SIGUSR1 in other environments."""
    environment = environment_of(trainer)
    return (environment and environment.requeue_signal) or signal.SIGUSR1


def requeue_job() -> bool:
    """Requeue the job of this process, or warn that this failed. Return whether it was requeued."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID", "")
    if array is not None:
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        problem = done.stderr.strip() or f"exit status {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        log.warning(
            "The job was not requeued: `scontrol requeue %s` failed with: %s. Run this command yourself: the "
            "checkpoint is complete.",
            job,
            problem,
        )
    else:
        log.info("Requeued the SLURM job %s.", job)
    return not problem
