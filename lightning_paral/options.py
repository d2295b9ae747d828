"""What users write in Python or YAML to group the options of a feature."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from torch.nn import Module

from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import checked_dataclass, checked_options

UnitChoice = str | type[Module] | Sequence[str | type[Module]] | Callable[[str, Module], bool]
"""`"auto"`, a class or its name, several of them, or a predicate of a submodule's dotted name and itself."""


@checked_dataclass
@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Keep only the inputs of each unit for the backward pass, and compute what is inside anew when it gets there.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174. Gradients stay the same, dropout
    included; each unit's forward runs once more.

    Raises:
        ConfigurationError: a value out of its range, or two ways to choose units at once.
    """

    units: UnitChoice = "auto"
    """Which submodules, as in `ParalFSDPStrategy(units=...)`; never one inside another."""

    min_params: int | None = None
    """Instead of `units`: the smallest submodules with at least so many parameters."""

    offload_to_cpu: bool = False
    """Keep the units' inputs in the host's memory, pinned on CUDA, until the backward pass needs them."""

    def __post_init__(self) -> None:
        check_unit_choice(self.units, self.min_params)


def check_unit_choice(units: UnitChoice, min_params: int | None) -> None:
    """Raise a `ConfigurationError` if units are chosen in no way or in two ways."""
    if min_params is not None and (units != "auto" or min_params < 1):
        raise ConfigurationError(
            f"units={units!r} and min_params={min_params!r} were given. Give units, or min_params of at least 1."
        )
    if not units:
        raise ConfigurationError("units is empty. Leave it out to have repeated blocks found, or name classes.")


@checked_dataclass
@dataclass(frozen=True)
class Offload:
    """Where ZeRO keeps what need not stay on the device: `Offload("cpu")`, `Offload("nvme", path="/local/scratch")`.

    Raises:
        ConfigurationError: a value out of its range, or NVMe without a path.
    """

    device: Literal["cpu", "nvme"] = "cpu"
    """`"cpu"` is the host's memory, `"nvme"` a file system on a fast local disk."""

    _: KW_ONLY

    path: str | Path | None = None
    """For `"nvme"`: an existing folder. Each run makes its own subfolder there, and removes it."""

    ratio: float = 1.0
    """Of the optimizer, at stage 3: the part offloaded, 0 to 1; the rest stays on the device."""

    pin_memory: bool | None = None
    """Lock the host's copies into memory, for faster transfers. `None`: on CUDA only."""

    buffer_count: int = 5
    """For `"nvme"`: buffers between disk and memory. The optimizer needs one per state, gradient and parameter: 4."""

    buffer_numel: int = 100_000_000
    """For parameters on `"nvme"`: elements per buffer; at least those of the largest parameter's share on a rank."""

    max_in_cpu_numel: int = 1_000_000_000
    """For parameters on `"nvme"`: elements that may stay in the host's memory all the time."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "nvme"):
            raise ConfigurationError(f"Offload(device={self.device!r}) is not known. Choose 'cpu' or 'nvme'.")
        if self.device == "nvme" and self.path is None:
            raise ConfigurationError(
                "Offload('nvme') needs a folder on the disk to use: Offload('nvme', path='/local/scratch'), or, with a "
                "strategy selected by name, the environment variable PARAL_NVME_PATH."
            )
        if not 0.0 <= self.ratio <= 1.0:
            raise ConfigurationError(f"Offload(ratio={self.ratio!r}) is not between 0 (nothing) and 1 (everything).")
        for option in ("buffer_count", "buffer_numel", "max_in_cpu_numel"):
            if getattr(self, option) < 1:
                raise ConfigurationError(f"Offload({option}={getattr(self, option)!r}) has to be at least 1.")


@checked_dataclass
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the samples of a loader are spread over the ranks; every strategy takes these as options of its own.

    Raises:
        ConfigurationError: a value that is not known.
    """

    split: Literal["batch", "global"] = "batch"
    """`"batch"`: each rank draws whole batches of the loader's size, in an order of the strategy's own at more than one
    rank. `"global"`: each batch is divided among the ranks, so that training is the same run at any world size.

    With `"global"`, and with one rank, batches are those of `Trainer(strategy="auto")` from the same seed, in training
    and in evaluation: samplers draw from the global generators of torch, numpy and `random` of rank 0, or from the
    loader's own, when one process would, and the generators go on behind them. That holds as long as nothing else draws
    differently on several ranks than in one process. What a module draws in its steps (dropout), or a dataset in
    `__getitem__` without workers, has other shapes there, so the orders of the epochs after the first may differ, where
    the loader has no generator of its own; they stay the same on all ranks. It does not hold for iterable datasets,
    whose shuffling has a seed of the strategy's own, and within an epoch of more than 256 batches for samplers that
    draw as they go while the module or the dataset draws, too."""

    remainder: Literal["drop", "wrap"] = "wrap"
    """For `split="batch"` in training, where the batches do not divide by the ranks: drop the last ones, or complete
    them with the first ones of the epoch."""

    shard_iterable: bool = True
    """Divide iterable datasets among ranks and workers. `False`: they look at rank and worker themselves."""

    def __post_init__(self) -> None:
        for option, known in (("split", ("batch", "global")), ("remainder", ("drop", "wrap"))):
            if getattr(self, option) not in known:
                raise ConfigurationError(
                    f"{option}={getattr(self, option)!r} is not known. Choose from: {', '.join(map(repr, known))}."
                )
        if not isinstance(self.shard_iterable, bool):
            raise ConfigurationError(f"shard_iterable={self.shard_iterable!r} is neither True nor False.")


Form = Literal["full", "sharded"]
"""Of a checkpoint: one ordinary Lightning file, or a folder with a file of each rank."""


@checked_dataclass
@dataclass(frozen=True)
class CheckpointOptions:
    """How checkpoints are written and loaded: `CheckpointOptions("sharded", async_save=True)`.

    Raises:
        ConfigurationError: an unknown form.
    """

    form: Form | None = None
    """`"full"`: one ordinary Lightning file. `"sharded"`: a folder with a file of each rank. `None`: full for DP
    and DDP, sharded for FSDP and ZeRO."""

    _: KW_ONLY

    save_frozen: bool = True
    """Whether parameters that need no gradient are saved, too. Without them, loading keeps the module's own."""

    async_save: bool = False
    """Copy the state to the host's memory and write it while training goes on; one save at a time."""

    restore_optimizer: bool = True
    """Whether resuming restores the optimizer's state; an error where the checkpoint has none that fits."""

    weights_only: bool = True
    """`False` trusts every checkpoint that is loaded: objects of any type are made, and code in the file runs. It says
    so for all strategies, while `trainer.fit(..., weights_only=False)` reaches DP and DDP only."""

    def __post_init__(self) -> None:
        if self.form not in ("full", "sharded", None):
            raise ConfigurationError(f"CheckpointOptions(form={self.form!r}) is not known. Choose 'full' or 'sharded'.")


def as_checkpoint_options(checkpoint: "CheckpointOptions | str | None") -> CheckpointOptions:
    """Return `"full"` and `"sharded"` as the `CheckpointOptions` they stand for."""
    return checkpoint if isinstance(checkpoint, CheckpointOptions) else CheckpointOptions(checkpoint)  # type: ignore[arg-type]


DEFAULT_TIMEOUT = timedelta(minutes=30)


class RankOptions(TypedDict, total=False):
    """Keywords that every strategy with several ranks takes, besides its own.

    Args:
        process_group_backend: backend for `torch.distributed`; by default gloo on CPU, `cuda:nccl,cpu:gloo` on CUDA.
        timeout: how long ranks wait for each other, when joining and in every collective; a number means seconds.
        checkpoint: `"full"`, one file; `"sharded"`, a folder; or `CheckpointOptions` with more. `None`: full for DDP,
            sharded for FSDP and ZeRO.
        activation_checkpointing: keep only the inputs of units for the backward pass, and recompute the activations.
        split: `"batch"`: each rank draws batches of its own. `"global"`: the ranks divide each batch. See `Sampling`.
        remainder: for `split="batch"`: drop the last batches of an epoch that do not divide by the ranks, or complete
            them with its first ones (`"wrap"`).
        shard_iterable: divide iterable datasets among ranks and workers. `False`: they do this themselves.
    """

    process_group_backend: str | None
    timeout: timedelta | float
    checkpoint: CheckpointOptions | Literal["full", "sharded"] | None
    activation_checkpointing: ActivationCheckpointing | None
    split: Literal["batch", "global"]
    remainder: Literal["drop", "wrap"]
    shard_iterable: bool


RANK_DEFAULTS = RankOptions(
    process_group_backend=None,
    timeout=DEFAULT_TIMEOUT,
    checkpoint=None,
    activation_checkpointing=None,
    split="batch",
    remainder="wrap",
    shard_iterable=True,
)


def pop_rank_options(keywords: Any) -> RankOptions:
    """Remove the options of `RankOptions` from `keywords`, a dict which may have others, too, and return them."""
    options: Any = {name: keywords.pop(name) for name in RANK_DEFAULTS if name in keywords}
    return cast(RankOptions, options)


takes_rank_options = partial(checked_options, shared=RankOptions, defaults=RANK_DEFAULTS)
"""Decorate a constructor that takes `**keywords: Unpack[RankOptions]`: its signature lists each of them by name."""
