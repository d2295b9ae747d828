"""Follow the training step of a module, without running it, in a fork of this process."""

import multiprocessing
import pickle
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_paral.compat.lightning.replaced_strategy import training_loaders
from lightning_paral.compat.torch.fake_tensors import hide_accelerators
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.options import ActivationCheckpointing
from lightning_paral.planning.fake import FakeModule, StepSettings
from lightning_paral.planning.layout import Layout
from lightning_paral.planning.states import ModelStates, count_states
from lightning_paral.planning.trace import ROOT, Point, Step, follow_step, planned_units

Result = TypeVar("Result")
_TENSOR = re.compile(r"\s*(?P<sizes>\d+(x\d+)*)\s*(:\s*(?P<dtype>\w+))?\s*")


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
    doubled: tuple[Step, Step | None] | None = None
    """Both with twice the batch, if they were asked for."""

    def step(self, layout: Layout, batch_size: int | None = None) -> Step | None:
        """Return the step of a rank under a layout, with a batch of another size; `None` if that is unknown."""
        index = int(layout.recomputes and self.recomputed is not None)
        step = (self.plain, self.recomputed)[index]
        assert step is not None
        if batch_size is None:
            return step
        doubled = self.doubled[index] if self.doubled is not None else None
        if doubled is None or self.batch_size is None:
            return None
        return step.scaled(doubled, batch_size / self.batch_size - 1)


def follow_steps(
    module: LightningModule | Callable[[], LightningModule],
    batch: Any,
    settings: StepSettings,
    datamodule: LightningDataModule | None = None,
    *,
    is_set_up: bool = False,
    on_cpu: bool = False,
    max_batch: bool = False,
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
        on_cpu: whether the device is the CPU.
        max_batch: also follow a step with twice the batch.
        checkpointing: what the user recomputes anyway; no other recomputation is then considered.
        timeout: seconds after which it is given up.

    Raises:
        ConfigurationError: the module cannot be built or counted, or it does not take the batch.
    """

    def follow() -> FollowedSteps:
        built = module if isinstance(module, LightningModule) else _build(module)
        fake = FakeModule(built, settings, datamodule, is_set_up=is_set_up)
        fake.configure_optimizers()
        return _follow(fake, batch() if callable(batch) else batch, on_cpu, max_batch, checkpointing)

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
    fake: FakeModule, batch: Any, on_cpu: bool, max_batch: bool, checkpointing: ActivationCheckpointing | None
) -> FollowedSteps:
    if batch is None:
        return _states_alone(fake, "No batch was given, so activations are not counted.")
    size = batch_size_of(batch)
    try:
        plain = follow_step(fake, batch, checkpointing, on_cpu=on_cpu)
    except Exception as error:
        _refuse_wrong_batch(fake.module, batch, error)
        reason = f"The step cannot be followed ({_first_line(error)}), so activations are not counted."
        return replace(_states_alone(fake, reason), batch_size=size)
    states = replace(count_states(fake.module, fake.optimizers), early_bytes=fake.early_bytes)
    recomputed = None
    if checkpointing is None and len(plain.units) > 1:
        with suppress(Exception):  # a block cannot be computed twice
            recomputed = follow_step(fake, batch, ActivationCheckpointing(), on_cpu=on_cpu)
    doubled = None
    if max_batch and size is not None:
        twice = resized(batch, 2 * size, size)
        again = None if recomputed is None else follow_step(fake, twice, ActivationCheckpointing(), on_cpu=on_cpu)
        doubled = follow_step(fake, twice, checkpointing, on_cpu=on_cpu), again
    return FollowedSteps(states=states, plain=plain, recomputed=recomputed, batch_size=size, doubled=doubled)


def _states_alone(fake: FakeModule, reason: str) -> FollowedSteps:
    """Return a step in which only gradients are allocated, unit by unit in reverse order."""
    states = replace(count_states(fake.module, fake.optimizers, assume_adam=True), early_bytes=fake.early_bytes)
    units = planned_units(fake.module, children=not fake.module.automatic_optimization)
    points, full = [Point(ROOT, False, 0, 0, states.gradient_bytes)], 0
    for index in (*reversed(range(len(units) - 1)), ROOT):
        for number in reversed(units[index].parameters):
            full += states.parameters[number].gradient_bytes
            points.append(Point(index, True, 0, 0, full, ready=number if states.parameters[number].is_trained else -1))
    largest = max((state.gradient_bytes for state in states.parameters), default=0)
    step = Step(points=tuple(points), units=units, temporary_bytes=2 * largest, has_activations=False, notes=(reason,))
    return FollowedSteps(states=states, plain=step)


def _refuse_wrong_batch(module: LightningModule, batch: Any, error: Exception) -> None:
    """Raise a `ConfigurationError` if `error` says that the module does not take the batch."""
    if isinstance(error, AttributeError):
        is_wrong = isinstance(error.obj, Tensor | dict | list | tuple)
    elif isinstance(error, RuntimeError):
        is_wrong = any(word in str(error) for word in ("shape", "size", "dtype", "expected"))
    else:
        is_wrong = isinstance(error, TypeError | KeyError | IndexError | ValueError | ConfigurationError)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if is_wrong and not any("torch/optim/" in file for file in files):  # such as LBFGS, which needs a closure
        raise ConfigurationError(
            f"{type(module).__name__}.training_step does not take the batch, {describe_batch(batch)}: "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def describe_batch(batch: Any) -> str:
    """Return the structure of a batch, for example `(int64 [8, 128], int64 [8, 128])`."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key!r}: {describe_batch(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return "(" + ", ".join(describe_batch(value) for value in batch) + ")"
    return type(batch).__name__


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
    if isinstance(loaders, dict):
        return {key: batch_of_loaders(loader) for key, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [batch_of_loaders(loader) for loader in loaders]
    try:
        return next(iter(loaders))
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
        found = _TENSOR.fullmatch(part)
        dtype = getattr(torch, found["dtype"] or "float32", None) if found else None
        if found is None or not isinstance(dtype, torch.dtype):
            raise ConfigurationError(
                f"--batch-shape {text!r}: {part.strip()!r} is not a shape. Write sizes and a dtype, as in "
                "8x128:int64,8x128:int64; without a dtype, it is float32."
            )
        shape = tuple(int(size) for size in found["sizes"].split("x"))
        tensors.append(torch.zeros((), dtype=dtype).expand(shape))  # takes no memory
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples of a batch; `None` if its tensors differ in their first dimension."""
    sizes: set[int] = set()
    apply_to_collection(batch, Tensor, lambda tensor: sizes.add(tensor.shape[0] if tensor.dim() else 1))
    if len(sizes) != 1:
        try:
            return int(extract_batch_size(batch))
        except Exception:
            return None
    return sizes.pop()


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
        clip_value=trainer.gradient_clip_val or None,
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


def count_unit_flops(trainer: Trainer, module: LightningModule, names: Sequence[str]) -> list[int]:
    """Return the floating-point operations of each unit of a chain in a step of a fit, as `follow_fit` does.

    What runs after a unit counts with it. The first unit also counts with the backward pass of what runs before it.

    Args:
        trainer: the Trainer.
        module: the module of the fit.
        names: the dotted names of the units, which are called in this order.

    Raises:
        ConfigurationError: the step cannot be followed, or has no counted operation in a unit.
    """
    strategy: Any = trainer.strategy

    def count() -> list[int]:
        fake = FakeModule(module, settings_of(trainer), vars(trainer).get("datamodule"), is_set_up=True)
        fake.configure_optimizers()
        batch = batch_of_loaders(training_loaders(trainer))
        with torch.backends.mkldnn.flags(enabled=False):  # its kernels of LSTMs have no formula
            step = follow_step(fake, batch, strategy.activation_checkpointing, names)
        return [unit.flops for unit in step.units[:-1]]

    try:
        flops = run_isolated(count, _patience(strategy))
    except IsolatedError as error:
        raise ConfigurationError(f"the training step cannot be followed on tensors without values: {error}") from error
    if not any(flops):
        raise ConfigurationError("none of the units has a matrix product, a convolution or attention")
    return flops


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
        answer = (False, function())
    except ParalError as error:
        answer = (True, error)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if "Autograd-and-Fork" in text:  # https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork
            text = (
                "this process has trained before, and with this build of torch, a fork of it cannot compute gradients, "
                "so it has to be done in a new process"
            )
        answer = (True, IsolatedError(text))
    try:
        pickle.dumps(answer)
    except Exception as error:
        answer = (True, IsolatedError(f"{type(error).__name__}: {error}"))
    writer.send(answer)
