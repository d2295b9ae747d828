"""Options that users write in Python or YAML: a dataclass for each feature, and the keywords that strategies share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from torch.nn import Module

from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import Init, checked_dataclass, checked_options

UnitChoice = str | type[Module] | Sequence[str | type[Module]] | Callable[[str, Module], bool]
"""`"auto"`, a class or its name, a list of these, or a predicate of a submodule's dotted name and the submodule."""


@checked_dataclass
@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Keep only the inputs of each unit for the backward pass, and recompute its activations there.

    Follows Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174. Gradients do not change,
    even with dropout. The forward pass of each unit runs twice.

    Raises:
        ConfigurationError: a value is out of range, or both `units` and `min_params` are given.
    """

    units: UnitChoice = "auto"
    """Which submodules are units, as in `ParalFSDPStrategy(units=...)`. A unit must not contain another."""

    min_params: int | None = None
    """Instead of `units`: the smallest submodules with at least this number of parameters."""

    offload_to_cpu: bool = False
    """Keep the inputs of units in host memory (pinned on CUDA) until the backward pass needs them."""

    def __post_init__(self) -> None:
        check_unit_choice(self.units, self.min_params)


def check_unit_choice(units: UnitChoice, min_params: int | None) -> None:
    """Raise a `ConfigurationError` if `units` is empty, or if `units` and `min_params` exclude each other."""
    if min_params is not None and (units != "auto" or min_params < 1):
        raise ConfigurationError(
            f"units={units!r} and min_params={min_params!r} were given. Give units, or min_params of at least 1."
        )
    if not units:
        raise ConfigurationError("units is empty. Leave it out to find repeated blocks, or name classes.")


@checked_dataclass
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

    ratio: float = 1.0
    """For the optimizer, at stage 3: the fraction to offload, from 0 to 1. The rest stays on the device."""

    pin_memory: bool | None = None
    """Whether to pin the copies in host memory, for faster transfers. `None`: on CUDA only."""

    buffer_count: int = 5
    """For `"nvme"`: number of buffers between disk and memory. Adam needs 4: two states, gradient and parameter."""

    buffer_numel: int = 100_000_000
    """For parameters on `"nvme"`: elements per buffer, at least as many as the largest shard of a parameter has."""

    max_in_cpu_numel: int = 1_000_000_000
    """For parameters on `"nvme"`: number of elements that may stay in host memory permanently."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "nvme"):
            raise ConfigurationError(f"Offload(device={self.device!r}) is not known. Choose 'cpu' or 'nvme'.")
        if self.device == "nvme" and self.path is None:
            raise ConfigurationError(
                "Offload('nvme') needs a folder on the disk: Offload('nvme', path='/local/scratch'). For a strategy "
                "selected by name, set the environment variable PARAL_NVME_PATH."
            )
        if not 0.0 <= self.ratio <= 1.0:
            raise ConfigurationError(f"Offload(ratio={self.ratio!r}) is not between 0 (nothing) and 1 (everything).")
        for option in ("buffer_count", "buffer_numel", "max_in_cpu_numel"):
            if getattr(self, option) < 1:
                raise ConfigurationError(f"Offload({option}={getattr(self, option)!r}) has to be at least 1.")


@checked_dataclass
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
    batches (`"drop"`), or add the first batches of the epoch (`"wrap"`)."""

    shard_iterable: bool = True
    """Divide the samples of iterable datasets among ranks and workers. `False`: the datasets do this themselves."""

    def __post_init__(self) -> None:
        for option, known in (("split", ("batch", "global")), ("remainder", ("drop", "wrap"))):
            if getattr(self, option) not in known:
                raise ConfigurationError(
                    f"{option}={getattr(self, option)!r} is not known. Choose from: {', '.join(map(repr, known))}."
                )
        if not isinstance(self.shard_iterable, bool):
            raise ConfigurationError(f"shard_iterable={self.shard_iterable!r} is neither True nor False.")


Form = Literal["full", "sharded"]
"""The format of a checkpoint: one ordinary Lightning file, or a folder to which each rank writes a file."""


@checked_dataclass
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

    def __post_init__(self) -> None:
        if self.form not in ("full", "sharded", None):
            raise ConfigurationError(f"CheckpointOptions(form={self.form!r}) is not known. Choose 'full' or 'sharded'.")


def as_checkpoint_options(checkpoint: "CheckpointOptions | str | None") -> CheckpointOptions:
    """Return `checkpoint` as `CheckpointOptions`; a string is their `form`."""
    return checkpoint if isinstance(checkpoint, CheckpointOptions) else CheckpointOptions(checkpoint)  # type: ignore[arg-type]


DEFAULT_TIMEOUT = timedelta(minutes=30)

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
"""`"popen"` runs the script again for each other local rank; the others are start methods of `multiprocessing`."""


def checked_interval(divergence_check_every: int | None) -> int | None:
    """Return the option `divergence_check_every`, or raise a `ConfigurationError` if it is below 1."""
    if divergence_check_every is not None and divergence_check_every < 1:
        raise ConfigurationError(
            f"divergence_check_every={divergence_check_every} has to be at least 1, a number of optimizer steps; None "
            "turns the check off."
        )
    return divergence_check_every


class RankOptions(TypedDict, total=False):
    """The keywords that every strategy with ranks takes, in addition to its own.

    Args:
        process_group_backend: the backend of `torch.distributed`. `None`: gloo on CPU, `cuda:nccl,cpu:gloo` on CUDA.
        timeout: how long ranks wait for each other when they join, and in every collective; a number means seconds.
        checkpoint: `"full"` writes one file, `"sharded"` a folder; `CheckpointOptions` has more options. `None`: full
            for DDP, sharded for FSDP and ZeRO.
        activation_checkpointing: keep only the inputs of units for the backward pass, and recompute the activations.
        split: `"batch"`: each rank draws its own batches. `"global"`: the ranks divide each batch. See `Sampling`.
        remainder: for `split="batch"`, if the number of batches is not divisible by the number of ranks: drop the last
            batches of an epoch (`"drop"`), or add its first batches (`"wrap"`).
        shard_iterable: divide the samples of iterable datasets among ranks and workers. `False`: the datasets do this
            themselves.
        start_method: how local ranks are started if no launcher such as torchrun starts them: `"popen"` runs the script
            again; `"fork"`, `"spawn"` and `"forkserver"` are start methods of `multiprocessing`. `None`: `"popen"` in a
            script; `"fork"` in a notebook, in an interactive session, under `python -c` and in pytest.
        divergence_check_every: after each this many optimizer steps, compare the bits of all parameters of which
            several ranks have a replica; a difference is an error that names the first parameter. `None`: never.
    """

    process_group_backend: str | None
    timeout: timedelta | float
    checkpoint: CheckpointOptions | Literal["full", "sharded"] | None
    activation_checkpointing: ActivationCheckpointing | None
    split: Literal["batch", "global"]
    remainder: Literal["drop", "wrap"]
    shard_iterable: bool
    start_method: StartMethod | None
    divergence_check_every: int | None


RANK_DEFAULTS = RankOptions(
    process_group_backend=None,
    timeout=DEFAULT_TIMEOUT,
    checkpoint=None,
    activation_checkpointing=None,
    split="batch",
    remainder="wrap",
    shard_iterable=True,
    start_method=None,
    divergence_check_every=None,
)


def split_rank_options(keywords: Mapping[str, Any]) -> tuple[RankOptions, dict[str, Any]]:
    """Return the options of `RankOptions` among `keywords`, and all other keywords."""
    shared: Any = {name: value for name, value in keywords.items() if name in RANK_DEFAULTS}
    return cast(RankOptions, shared), {name: value for name, value in keywords.items() if name not in RANK_DEFAULTS}


takes_rank_options = partial(checked_options, shared=RankOptions, defaults=RANK_DEFAULTS)
"""Decorate a constructor that takes `**keywords: Unpack[RankOptions]`: its signature lists each of them by name."""


def takes_options(keywords: type, defaults: Mapping[str, Any]) -> Callable[[Init], Init]:
    """Return a decorator like `takes_rank_options` for the keywords of a strategy, which include `RankOptions`.

    Args:
        keywords: a `TypedDict` that derives from `RankOptions` and documents the strategy's own keywords.
        defaults: the defaults of the strategy's own keywords, in the order of the signature.
    """
    _, _, arguments = (RankOptions.__doc__ or "").partition("Args:\n")
    docstring = f"{(keywords.__doc__ or '').rstrip()}\n{arguments}"
    return partial(checked_options, shared=keywords, defaults={**defaults, **RANK_DEFAULTS}, docstring=docstring)
