"""Follow the training step of a module, without running it, in a fork of this process."""

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_paral.compat.lightning.strategies import training_loaders
from lightning_paral.compat.torch.tensors import hide_accelerators
from lightning_paral.data.parts import first_samples
from lightning_paral.distributed.hangs import place_of
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.options import ActivationCheckpointing
from lightning_paral.planning.fake import FakeModule, StepSettings
from lightning_paral.planning.trace import ModelStates, Step, count_states, follow_step, step_of_states, tensors_in

Result = TypeVar("Result")


class IsolatedError(ParalError, RuntimeError):
    """The function failed, crashed its process, or did not return in time."""


@dataclass(frozen=True)
class FollowedSteps:
    """What was learned about a module: its states, and its step with and without recomputation."""

    module_name: str
    settings: StepSettings
    on_cpu: bool
    """Whether the device is the CPU."""
    states: ModelStates
    plain: Step
    recomputed: Step | None = None
    """`None` if the module has no repeated blocks."""
    batch_size: int | None = None
    """Samples per batch and rank; `None` if it is unknown."""


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
        given = batch() if callable(batch) else batch
        recomputed = None
        try:
            if given is None:
                raise ConfigurationError("No batch was given")
            plain = follow_step(fake, given, checkpointing, on_cpu=on_cpu)
            states = count_states(fake)
            if checkpointing is None and len(plain.units) > 1:
                with suppress(Exception):  # a block cannot be computed twice
                    recomputed = follow_step(fake, given, ActivationCheckpointing(), on_cpu=on_cpu)
        except Exception as error:
            reason = str(error) if given is None else f"The step cannot be followed ({_described(error)})"
            states = count_states(fake, assume_adam=True)
            plain = step_of_states(fake, states, f"{reason}, so activations are not counted.")
        size = batch_size_of(given)
        return FollowedSteps(type(built).__name__, settings, on_cpu, states, plain, recomputed, size)

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
            what = f"--batch-shape {text!r}: {part.strip()!r} is no shape, such as 8x128:int64, or 8x3x32x32 of float32"
            raise ConfigurationError(f"{what}.") from None
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples of a batch; `None` if its tensors differ in their first dimension."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


# A fit that has begun


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
        return batch if parts == 1 or size is None else first_samples(batch, 0, -(-size // parts))

    return follow_steps(
        module,
        first,
        StepSettings(precision=str(trainer.precision), accumulate=trainer.accumulate_grad_batches),
        vars(trainer).get("datamodule"),
        is_set_up=True,
        on_cpu=strategy.root_device.type == "cpu",
        checkpointing=strategy.activation_checkpointing,
        timeout=min(300.0, strategy.timeout.total_seconds() / 2),
    )


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
    except BaseException as error:
        writer.send((True, error if isinstance(error, ParalError) else IsolatedError(_described(error))))
