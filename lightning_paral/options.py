"""Options that users write in Python or YAML: a dataclass for each feature, and those that strategies share."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from torch.nn import Module

from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import Positive, checked

UnitChoice = str | type[Module] | Sequence[str | type[Module]] | Callable[[str, Module], bool]
"""`"auto"`, a class or its name, a list of these, or a predicate of a submodule's dotted name and the submodule."""

ADVICE_ON_UNITS = {
    "min_params": "Use units=..., with a function of name and module, such as of the number of its parameters.",
}
"""What to do instead of giving a former option that chose units."""


@checked
@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Keep only the inputs of each unit for the backward pass, and recompute its activations there.

    Follows Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174. Gradients do not change,
    even with dropout. The forward pass of each unit runs twice.

    Raises:
        ConfigurationError: a value is out of range.
    """

    units: UnitChoice = "auto"
    """Which submodules are units, as in `ParalFSDPStrategy(units=...)`. A unit must not contain another."""

    offload_to_cpu: bool = False
    """Keep inputs of units that are on a GPU in pinned host memory until the backward pass needs them. Copies do not
    overlap computation."""

    advice: ClassVar[dict[str, str]] = ADVICE_ON_UNITS

    def __post_init__(self) -> None:
        check_unit_choice(self.units)


def check_unit_choice(units: UnitChoice) -> None:
    """Raise a `ConfigurationError` if `units` is empty."""
    if not units:
        raise ConfigurationError("units is empty. Leave it out to find repeated blocks, or name classes.")


@checked
@dataclass(frozen=True)
class Offload:
    """Where ZeRO keeps offloaded state: `Offload("cpu")` or `Offload("nvme", path="/local/scratch")`.

    Raises:
        ConfigurationError: a value is out of range, or `"nvme"` has no `path`.
    """

    device: Literal["cpu", "nvme"] = "cpu"
    """`"cpu"` is host memory, `"nvme"` a file system on a fast local disk."""

    _: KW_ONLY

    path: str | Path | None = None
    """For `"nvme"`: an existing folder. Each run creates a subfolder in it, and removes the subfolder at the end."""

    pin_memory: bool | None = None
    """Whether to pin the copies in host memory, for faster transfers. `None`: on CUDA only."""

    buffer_count: Positive = 5
    """For `"nvme"`: number of buffers between disk and memory. Adam needs 4: two states, gradient and parameter."""

    buffer_numel: Positive = 100_000_000
    """For parameters on `"nvme"`: elements per buffer, at least as many as the largest shard of a parameter has."""

    max_in_cpu_numel: Positive = 1_000_000_000
    """For parameters on `"nvme"`: number of elements that may stay in host memory permanently."""

    advice: ClassVar[dict[str, str]] = {"ratio": "All of the optimizer is offloaded. Leave out ratio."}

    def __post_init__(self) -> None:
        if self.device == "nvme" and self.path is None:
            raise ConfigurationError(
                "Offload('nvme') needs a folder on the disk: Offload('nvme', path='/local/scratch'). For a strategy "
                "selected by name, set the environment variable PARAL_NVME_PATH."
            )


@checked
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the samples of a loader are distributed over the ranks. Strategies with ranks take these options directly.

    Raises:
        ConfigurationError: a value is unknown.
    """

    split: Literal["batch", "global"] = "batch"
    """`"batch"`: each rank draws full batches of the loader's size. `"global"`: the ranks divide each batch, so that
    training gives the same numbers at any world size.

    With `"global"`, or with one rank, batches equal those of `Trainer(strategy="auto")` with the same seed, in training
    and in evaluation. Samplers draw from rank 0's global generators of torch, numpy and `random`, or from the loader's
    own generator, at the same times as in one process. With `"batch"` and several ranks, the strategy draws the order
    with its own seed.

    All ranks always use the same order, but it can differ from that of one process in three cases. First, in later
    epochs, if the module draws random numbers in its steps (dropout), or a dataset without workers does so in
    `__getitem__`: with several ranks, they draw fewer numbers from the global generators than with one. Pass a
    `generator` to the loader to prevent this. Second, for iterable datasets, which are shuffled with a seed of the
    strategy. Third, in epochs of more than 256 batches, if the sampler draws lazily while the module or the dataset
    draws as well."""

    remainder: Literal["drop", "wrap"] = "wrap"
    """For `split="batch"` in training, if the number of batches is not divisible by the number of ranks: drop the last
    batches (`"drop"`), or add the first batches of the epoch, in a stream those of the last step (`"wrap"`)."""

    shard_iterable: bool = True
    """Divide the samples of iterable datasets among ranks and workers. `False`: the datasets do this themselves."""


Form = Literal["full", "sharded"]
"""The format of a checkpoint: one ordinary Lightning file, or a folder to which each rank writes a file."""


@checked
@dataclass(frozen=True)
class CheckpointOptions:
    """How checkpoints are written and loaded: `CheckpointOptions("sharded", async_save=True)`.

    Raises:
        ConfigurationError: `form` is unknown.
    """

    form: Form | None = None
    """`"full"`: one ordinary Lightning file. `"sharded"`: a folder to which each rank writes a file. `None`:
    full for DP and DDP, sharded for FSDP and ZeRO."""

    _: KW_ONLY

    save_frozen: bool = True
    """Whether to save frozen parameters. If they were not saved, loading keeps the module's own values."""

    async_save: bool = False
    """Copy the state to host memory, and write it while training continues. Only one save runs at a time."""

    restore_optimizer: bool = True
    """Whether to restore the optimizer state when resuming. If so, a checkpoint without a matching one is an error."""

    weights_only: bool = True
    """`False` trusts every checkpoint: loading creates objects of any type and runs code in the file. This works under
    all strategies; `trainer.fit(..., weights_only=False)` works only under DP and DDP."""


DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of every strategy.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in Lightning's
            `ParallelStrategy`; the Trainer sets them.
        checkpoint: `"full"` writes one file, `"sharded"` a folder; `CheckpointOptions` has more options. `None`: full
            for DP and DDP, sharded for the others.
    """

    accelerator: Accelerator | None = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None
    checkpoint: CheckpointOptions | Literal["full", "sharded"] | None = None

    advice: ClassVar[dict[str, str]] = {
        "accelerator": "It belongs to the Trainer: Trainer(accelerator=..., strategy=...).",
        "parallel_devices": "They belong to the Trainer: Trainer(devices=..., strategy=...).",
        "precision_plugin": "It belongs to the Trainer: Trainer(precision=..., strategy=...).",
    }
    """What to do if an option has a wrong type or is unknown, such as one of another library, by its name."""

    @property
    def of_trainer(self) -> dict[str, Any]:
        """What the user gave in place of the Trainer, by name."""
        names = [field.name for field in fields(StrategyOptions) if field.name != "checkpoint"]
        return {name: given for name in names if (given := getattr(self, name)) is not None}

    @property
    def checkpoint_options(self) -> CheckpointOptions:
        """The option `checkpoint`; a string is the `form`."""
        given = self.checkpoint
        return given if isinstance(given, CheckpointOptions) else CheckpointOptions(given)


@dataclass(frozen=True, kw_only=True)
class RankOptions(Sampling, StrategyOptions):
    """The options of every strategy with ranks.

    Args:
        process_group_backend: the backend of `torch.distributed`. `None`: gloo on CPU, `cuda:nccl,cpu:gloo` on CUDA.
        timeout: how long ranks wait for each other when they join, and in every collective; a number means seconds.
        activation_checkpointing: keep only the inputs of units for the backward pass, and recompute the activations.
        split: `"batch"`: each rank draws its own batches. `"global"`: the ranks divide each batch. See `Sampling`.
        remainder: for `split="batch"`, if the number of batches is not divisible by the number of ranks: drop the last
            batches of an epoch (`"drop"`), or add its first batches (`"wrap"`), in a stream those of its last step.
        shard_iterable: divide the samples of iterable datasets among ranks and workers. `False`: the datasets do this
            themselves.

    Raises:
        ConfigurationError: `timeout` is not positive, or not finite.
    """

    process_group_backend: str | None = None
    timeout: timedelta | float = DEFAULT_TIMEOUT
    activation_checkpointing: ActivationCheckpointing | None = None
    advice = StrategyOptions.advice | {"start_method": "Scripts are run again for each rank, and notebooks are forked."}

    def __post_init__(self) -> None:
        if self.longest_wait <= timedelta(0):
            raise ConfigurationError(
                f"timeout={self.timeout!r} has to be longer than zero and finite: a timedelta, or a number of seconds."
            )

    @property
    def longest_wait(self) -> timedelta:
        """The option `timeout`; a number means seconds."""
        try:
            return self.timeout if isinstance(self.timeout, timedelta) else timedelta(seconds=float(self.timeout))
        except (ValueError, OverflowError):  # NaN or infinite
            return timedelta(0)

    @property
    def sampling(self) -> Sampling:
        """The options of `Sampling` alone."""
        return Sampling(split=self.split, remainder=self.remainder, shard_iterable=self.shard_iterable)
