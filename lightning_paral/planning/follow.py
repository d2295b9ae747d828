"""Follow the training step of a module, without running it, in a fork of this process."""

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_paral.compat.lightning.strategies import training_loaders
from lightning_paral.compat.torch.tensors import hide_accelerators
from lightning_paral.distributed.hangs import place_of
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.options import ActivationCheckpointing
from lightning_paral.planning.fake import FakeModule, StepSettings
from lightning_paral.planning.layout import Layout
from lightning_paral.planning.trace import (
    ROOT,
    ModelStates,
    Point,
    Step,
    count_states,
    follow_step,
    planned_units,
    tensors_in,
)

Result = TypeVar("Result")


class IsolatedError(ParalError, RuntimeError):
    """The function failed, crashed its process, or did not return in time."""


@dataclass(frozen=True, kw_only=True)
class FollowedSteps:
    """What was learned about a module: its states, and its step with and without recomputation."""

    states: ModelStates
    plain: Step
    recomputed: Step | None = None
    """`None` if the module has no repeated blocks."""
    batch_size: int | None = None
    """Samples per batch and rank; `None` if it is unknown."""

    def step(self, layout: Layout) -> Step:
        """Return the step of a rank under a layout."""
        return self.recomputed if layout.recomputes and self.recomputed is not None else self.plain


def follow_steps(
    module: LightningModule | Callable[[], LightningModule],
    batch: Any,
    settings: StepSettings,
    datamodule: LightningDataModule | None = None,
    *,
    is_set_up: bool = False,
    on_cpu: bool = False,
    checkpointing: ActivationCheckpointing | None = None,
    timeout: float = 300.0,
) -> FollowedSteps:
    """Follow a step with and without recomputation, in a fork of this process.

    If the step cannot be followed, for example because it depends on values of tensors, or does not take the batch,
    only the states are counted, and a note names the error.

    Args:
        module: the module or a function that returns it.
        batch: a batch of one rank, or a function that returns it and runs in the fork; `None` for model states alone.
        settings: the Trainer's settings.
        datamodule: what `trainer.datamodule` is in hooks.
        is_set_up: whether `setup("fit")` of the module has been called.
        on_cpu: whether the device is the CPU.
        checkpointing: what the user recomputes anyway; no other recomputation is then considered.
        timeout: seconds after which it is given up.

    Raises:
        ConfigurationError: the module cannot be built or counted.
    """

    def follow() -> FollowedSteps:
        built = module if isinstance(module, LightningModule) else _build(module)
        fake = FakeModule(built, settings, datamodule, is_set_up=is_set_up)
        fake.configure_optimizers()
        given = batch() if callable(batch) else batch
        if given is None:
            return _states_alone(fake, "No batch was given, so activations are not counted.")
        try:
            return _follow(fake, given, on_cpu, checkpointing)
        except Exception as error:
            reason = f"The step cannot be followed ({_described(error)}), so activations are not counted."
            return replace(_states_alone(fake, reason), batch_size=batch_size_of(given))

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


def _follow(fake: FakeModule, batch: Any, on_cpu: bool, checkpointing: ActivationCheckpointing | None) -> FollowedSteps:
    plain = follow_step(fake, batch, checkpointing, on_cpu=on_cpu)
    states = count_states(fake.module, fake.optimizers, early_bytes=fake.early_bytes)
    recomputed = None
    if checkpointing is None and len(plain.units) > 1:
        with suppress(Exception):  # a block cannot be computed twice
            recomputed = follow_step(fake, batch, ActivationCheckpointing(), on_cpu=on_cpu)
    return FollowedSteps(states=states, plain=plain, recomputed=recomputed, batch_size=batch_size_of(batch))


def _states_alone(fake: FakeModule, reason: str) -> FollowedSteps:
    """Return a step without activations, in which each unit computes its gradients while all others exist."""
    states = count_states(fake.module, fake.optimizers, early_bytes=fake.early_bytes, assume_adam=True)
    units = planned_units(fake.module)
    points = tuple(Point(unit, True, 0, 0, states.gradient_bytes) for unit in (*range(len(units) - 1), ROOT))
    step = Step(points=points, units=units, temporary_bytes=2 * states.largest_gradient_bytes, notes=(reason,))
    return FollowedSteps(states=states, plain=step)


def _described(error: BaseException) -> str:
    """Return the error, and the line of the innermost function that is not in a library."""
    frames = traceback.walk_tb(error.__traceback__)
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}, raised in {place_of(reversed(list(frames))).text}"


# Batches


def first_batch(module: LightningModule, datamodule: LightningDataModule | None) -> Any:
    """Return the first training batch. It prepares and sets up the data, and creates the training loader.

    Args:
        module: has the training loader if there is no data module.
        datamodule: the data.

    Raises:
        ConfigurationError: there is no training data, or it is empty.
    """
    source = datamodule if datamodule is not None else module
    if not is_overridden("train_dataloader", source):
        raise ConfigurationError(
            f"{type(source).__name__} has no training data. Give the data, or the shape of a batch, for example "
            "--batch-shape 8x128:int64,8x128:int64."
        )
    source.prepare_data()
    if datamodule is not None:
        datamodule.setup("fit")
    return batch_of_loaders(source.train_dataloader())


def batch_of_loaders(loaders: Any) -> Any:
    """Return the first batch of a loader; for a list or dict of loaders, one of each.

    Raises:
        ConfigurationError: a loader has no batch.
    """
    try:
        return next(iter(CombinedLoader(loaders, "max_size_cycle")))[0]
    except StopIteration:
        raise ConfigurationError("The training loader has no batch, so no step can be planned.") from None


def batch_of_shape(text: str) -> Any:
    """Return a batch of zeros; a tuple if there are several tensors.

    Args:
        text: shapes and dtypes, such as `8x128:int64,8x128:int64` or `16x3x224x224,16:int64`. Without a dtype: float32.

    Raises:
        ConfigurationError: the text is not of this form.
    """
    tensors = []
    for part in text.split(","):
        sizes, _, dtype = part.strip().partition(":")
        try:
            zero = torch.zeros((), dtype=getattr(torch, dtype or "float32"))
            tensors.append(zero.expand([int(size) for size in sizes.split("x")]))  # takes no memory
        except (AttributeError, TypeError, ValueError, RuntimeError):
            raise ConfigurationError(
                f"--batch-shape {text!r}: {part.strip()!r} is not a shape. Write sizes and a dtype, as in "
                "8x128:int64,8x128:int64; without a dtype, it is float32."
            ) from None
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples of a batch; `None` if its tensors differ in their first dimension."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def resized(batch: Any, size: int, batch_size: int) -> Any:
    """Return a batch of `size` samples in place of `batch_size`, without memory of its own."""

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != batch_size:
            return tensor
        return torch.zeros((), dtype=tensor.dtype).expand(size, *tensor.shape[1:])

    return apply_to_collection(batch, Tensor, resize)


# A fit that has begun


def settings_of(trainer: Trainer) -> StepSettings:
    """Return the settings of a Trainer on which a plan depends."""
    return StepSettings(
        precision=str(trainer.precision),
        accumulate=trainer.accumulate_grad_batches,
    )


def follow_fit(trainer: Trainer, module: LightningModule) -> FollowedSteps:
    """Follow a step of a fit in which the hooks `setup` have run, but the module has not been wrapped.

    Not collective: one rank alone may call it. It takes at most half of the time that the others wait in a collective.
    The first batch is drawn in the fork, so that no random number of this process is drawn.

    Raises:
        ConfigurationError: the module cannot be planned.
    """
    strategy: Any = trainer.strategy
    # Each rank has a batch of the loader, or a part of it; the devices of DP divide it by themselves.
    parts = strategy.dims.data_size if strategy.sampling.split == "global" and trainer.world_size > 1 else 1

    def first() -> Any:
        batch = batch_of_loaders(training_loaders(trainer))
        size = batch_size_of(batch)
        return batch if parts == 1 or size is None else resized(batch, -(-size // parts), size)

    return follow_steps(
        module,
        first,
        settings_of(trainer),
        vars(trainer).get("datamodule"),
        is_set_up=True,
        on_cpu=strategy.root_device.type == "cpu",
        checkpointing=strategy.activation_checkpointing,
        timeout=_patience(strategy),
    )


def _patience(strategy: Any) -> float:
    """Return for how many seconds one rank may work while the others wait in a collective."""
    return min(300.0, float(strategy.timeout.total_seconds()) / 2)


# A fork


def run_isolated(function: Callable[[], Result], timeout: float = 300.0) -> Result:
    """Return what `function` returns in a fork of this process, so that it can neither change nor crash this one.

    Args:
        function: its result must be picklable. It computes with one thread, because OpenMP's threads do not exist in a
            fork.
        timeout: seconds after which the fork is ended.

    Raises:
        ParalError: `function` raised it.
        IsolatedError: `function` raised another error, which the message names; or it crashed or took too long.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, writer))
    process.start()
    writer.close()
    try:
        if not reader.poll(timeout):
            raise IsolatedError(f"it did not end within {timeout:.0f} seconds")
        has_failed, result = reader.recv()
    except EOFError:
        raise IsolatedError("its process crashed") from None
    finally:
        reader.close()
        process.kill()
        process.join()
    if has_failed:
        raise result
    return result  # type: ignore[no-any-return]


def _answer(function: Callable[[], Any], writer: Connection) -> None:
    torch.set_num_threads(1)
    hide_accelerators()
    try:
        writer.send((False, function()))
    except ParalError as error:
        writer.send((True, error))
    except BaseException as error:
        text = _described(error)
        if "Autograd-and-Fork" in str(error):  # https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork
            text = (
                "this process has trained before, and with this build of torch, a fork of it cannot compute gradients, "
                "so it has to be done in a new process"
            )
        writer.send((True, IsolatedError(text)))
