"""Follow the training step of a module, without running it, in a fork of this process."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_paral.errors import ConfigurationError
from lightning_paral.options import ActivationCheckpointing
from lightning_paral.planning.batch import batch_size_of, resized
from lightning_paral.planning.fake_step import StepFollower, states_alone
from lightning_paral.planning.isolated import IsolatedError, run_isolated
from lightning_paral.planning.layout import Layout
from lightning_paral.planning.scaling import ScaledSteps, scaled_steps
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class FollowedSteps:
    """What was learned about a module: its states, and its step with and without recomputation."""

    states: ModelStates
    plain: Timeline
    recomputed: Timeline | None
    """`None` if the module has no repeated blocks."""
    batch_size: int | None
    """Samples per batch and rank; `None` if it is unknown."""
    divided: Timeline | None = None
    """The step with one device's part of the batch, for DP; `None` if the batch was not divided."""
    scaled_plain: ScaledSteps | None = None
    scaled_recomputed: ScaledSteps | None = None

    def timeline(self, layout: Layout) -> Timeline:
        """Return the step of a rank, or of a device of DP, under a layout."""
        if layout.engine == "dp" and self.divided is not None:
            return self.divided
        return self.recomputed if layout.recomputes and self.recomputed is not None else self.plain


def follow_steps(
    module: LightningModule | Callable[[], LightningModule],
    batch: Any,
    settings: StepSettings,
    datamodule: LightningDataModule | None = None,
    *,
    is_set_up: bool = False,
    max_batch: bool = False,
    num_devices: int = 1,
    checkpointing: ActivationCheckpointing | None = None,
    timeout: float = 300.0,
) -> FollowedSteps:
    """Follow a step with and without recomputation, in a fork of this process.

    Args:
        module: the module or a function that returns it.
        batch: a batch of one rank, or a function that returns it and runs in the fork; `None` for model states alone.
        settings: the Trainer's settings.
        datamodule: what `trainer.datamodule` is in hooks.
        is_set_up: whether `setup("fit")` of the module has been called.
        max_batch: also follow a step with twice the batch.
        num_devices: into how many parts DP divides the batch; if larger than 1, also follow a step with one of them.
        checkpointing: what the user recomputes anyway; no other recomputation is then considered.
        timeout: seconds after which it is given up.

    Raises:
        ConfigurationError: the module cannot be built or counted, or it does not take the batch.
    """

    def follow() -> FollowedSteps:
        built = module if isinstance(module, LightningModule) else _build(module)
        follower = StepFollower(built, settings, datamodule, is_set_up=is_set_up)
        follower.configure_optimizers()
        first = batch() if callable(batch) else batch
        return _follow(follower, first, max_batch=max_batch, num_devices=num_devices, checkpointing=checkpointing)

    try:
        return run_isolated(follow, timeout)
    except IsolatedError as error:
        raise ConfigurationError(f"The module cannot be planned: {error}.") from error


def _build(make: Callable[[], LightningModule]) -> LightningModule:
    try:
        with torch.device("meta"):
            return make()
    except Exception:  # it needs values
        return make()


def _follow(
    follower: StepFollower,
    batch: Any,
    *,
    max_batch: bool,
    num_devices: int,
    checkpointing: ActivationCheckpointing | None,
) -> FollowedSteps:
    if batch is None:
        timeline = states_alone(follower, "No batch was given, so activations are not counted.")
        return FollowedSteps(states=follower.states(), plain=timeline, recomputed=None, batch_size=None)
    size = batch_size_of(batch)
    try:
        plain = follower.follow(batch, checkpointing)
    except Exception as error:
        _refuse_wrong_batch(follower.module, batch, error)
        reason = f"The step cannot be followed ({_first_line(error)}), so activations are not counted."
        timeline = states_alone(follower, reason)
        return FollowedSteps(states=follower.states(), plain=timeline, recomputed=None, batch_size=size)
    states = follower.states()
    recomputed = None if checkpointing is not None else _recomputed(follower, batch)
    divided = None
    if num_devices > 1 and size is not None:
        divided = follower.follow(resized(batch, -(-size // num_devices), size))
    scaled: list[ScaledSteps | None] = [None, None]
    if max_batch and size is not None:
        double = resized(batch, 2 * size, size)
        scaled[0] = scaled_steps(plain, follower.follow(double, checkpointing), size, 2 * size)
        if recomputed is not None:
            scaled[1] = scaled_steps(recomputed, follower.follow(double, ActivationCheckpointing()), size, 2 * size)
    return FollowedSteps(
        states=states,
        plain=plain,
        recomputed=recomputed,
        batch_size=size,
        divided=divided,
        scaled_plain=scaled[0],
        scaled_recomputed=scaled[1],
    )


def _recomputed(follower: StepFollower, batch: Any) -> Timeline | None:
    try:
        return follower.follow(batch, ActivationCheckpointing())
    except Exception:  # no repeated blocks, or one that cannot be computed twice
        return None


def _refuse_wrong_batch(module: LightningModule, batch: Any, error: Exception) -> None:
    """Raise a `ConfigurationError` if `error` says that the module does not take the batch."""
    if isinstance(error, AttributeError):
        is_wrong = isinstance(error.obj, torch.Tensor | dict | list | tuple)
    elif isinstance(error, RuntimeError):
        is_wrong = any(word in str(error) for word in ("shape", "size", "dtype", "expected"))
    else:
        is_wrong = isinstance(error, TypeError | KeyError | IndexError | ValueError | ConfigurationError)
    if is_wrong and not _is_of_optimizer(error):
        raise ConfigurationError(
            f"{type(module).__name__}.training_step does not take the batch, {describe_batch(batch)}: "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error


def _is_of_optimizer(error: Exception) -> bool:
    """Return whether an optimizer raised `error`, such as LBFGS, which needs a closure."""
    return any("torch/optim/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def describe_batch(batch: Any) -> str:
    """Return the structure of a batch, for example `(int64 [8, 128], int64 [8, 128])`."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key!r}: {describe_batch(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(describe_batch(value) for value in batch) + ")"
    return type(batch).__name__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
