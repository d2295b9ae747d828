"""The options of `ParalDDPStrategy`, and an explanation of DDP's error about unused parameters."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_paral.comm import WireDtype
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import RankOptions
from lightning_paral.planning.layout import Layout

AllReduceName = Literal["auto", "ring", "native", "reduce_broadcast", "all_to_all"]
_INDICES_WITHOUT_GRADIENT = re.compile(r"did not receive grad for rank \d+:((?: \d+)+)")


@dataclass(frozen=True, kw_only=True)
class DistributedDataParallelOptions:
    """The options of the installed `torch.nn.parallel.DistributedDataParallel`, with torch's defaults.

    Args:
        output_device, dim, broadcast_buffers, init_sync, bucket_cap_mb, bucket_cap_mb_list, find_unused_parameters,
            check_reduction, static_graph, delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision,
            device_mesh, process_group, skip_all_reduce_unused_params, batched_grad_copy, forward_sync_buffers: as in
            `torch.nn.parallel.DistributedDataParallel`. Some need a recent torch.

    Raises:
        ConfigurationError: the installed torch lacks the option, or buckets would be empty.
    """

    output_device: int | torch.device | None = None
    dim: int = 0
    broadcast_buffers: bool | None = None
    init_sync: bool = True
    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: list[float] | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    static_graph: bool = False
    delay_all_reduce_named_params: Any = None
    param_to_hook_all_reduce: Any = None
    mixed_precision: Any = None
    device_mesh: Any = None
    process_group: Any = None
    skip_all_reduce_unused_params: bool = False
    batched_grad_copy: bool = False
    forward_sync_buffers: bool | None = None

    def __post_init__(self) -> None:
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        missing = [name for name in self.for_torch if name not in known]
        if missing:
            raise ConfigurationError(
                f"ParalDDPStrategy({missing[0]}=...): DistributedDataParallel of torch {torch.__version__} does not "
                "have this option. Leave it out, or install a later torch."
            )
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ConfigurationError(
                f"ParalDDPStrategy(bucket_cap_mb={self.bucket_cap_mb!r}): buckets must be larger than 0 MiB."
            )

    @property
    def for_torch(self) -> dict[str, Any]:
        """The options that differ from torch's defaults, by name."""
        defaults = {field.name: field.default for field in fields(DistributedDataParallelOptions)}
        return {name: given for name, default in defaults.items() if (given := getattr(self, name)) != default}


@dataclass(frozen=True, kw_only=True)
class DDPOptions(RankOptions, DistributedDataParallelOptions):
    """The options of `ParalDDPStrategy`.

    Args:
        all_reduce: the algorithm that averages gradients: `"native"` is the backend's all-reduce; `"ring"`,
            `"reduce_broadcast"` and `"all_to_all"` are those of `lightning_paral.comm`, for any backend. On gloo
            with a `wire_dtype`, `"auto"` is `"ring"` for buckets of at least 0.75 MiB per rank and for all between two
            ranks, and `"native"` for smaller ones. Otherwise it is `"native"`, which was never slower than the ring in
            our measurements (docs/measurements.md).
        wire_dtype: the dtype in which gradients travel, `"bf16"` or `"fp16"`; they are summed in their own dtype.
            It halves the traffic of fp32 gradients, except on NCCL between nodes of more than four GPUs each: there,
            the fp32 sum needs an all-to-all, which sends more data between nodes than NCCL's rings. `None`: their own
            dtype.
        gradient_as_bucket_view: make `.grad` a view into the communication bucket, which saves the memory of a copy of
            all gradients. Code that assigns new memory to a gradient (`p.grad.data = ...`) then trains incorrectly,
            because torch's reducer does not notice.
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper: your own communication hook, as in Lightning's `DDPStrategy`,
            but also used on CPU. Cannot be combined with `all_reduce` or `wire_dtype`.

    Raises:
        ConfigurationError: a hook is combined with another all-reduce.
    """

    all_reduce: AllReduceName = "auto"
    wire_dtype: WireDtype | None = None
    gradient_as_bucket_view: bool = False
    ddp_comm_state: object | None = None
    ddp_comm_hook: Callable[..., Any] | None = None
    ddp_comm_wrapper: Callable[..., Any] | None = None
    advice = RankOptions.advice | {"model_averaging_period": "Use ParalLocalSGDStrategy(period=...)."}

    def __post_init__(self) -> None:
        RankOptions.__post_init__(self)
        DistributedDataParallelOptions.__post_init__(self)
        if self.ddp_comm_hook is not None and (self.all_reduce != "auto" or self.wire_dtype is not None):
            raise ConfigurationError(
                f"ddp_comm_hook replaces the all-reduce of gradients, but all_reduce={self.all_reduce!r} and "
                f"wire_dtype={self.wire_dtype!r} were given as well. Give one or the other."
            )

    @property
    def for_torch(self) -> dict[str, Any]:
        """The options of `DistributedDataParallel`, by name."""
        return super().for_torch | {"gradient_as_bucket_view": self.gradient_as_bucket_view}

    @property
    def strategy_name(self) -> str:
        """The registered name that is closest to these options."""
        return "paral_ddp_ring" if self.all_reduce == "ring" else "paral_ddp"

    @property
    def layout(self) -> Layout:
        """How a plan counts the strategy."""
        recomputes = self.activation_checkpointing is not None
        return Layout(strategy=self.strategy_name, engine="ddp", recomputes=recomputes)


def explain_unused(message: str, names: list[str], rank: int) -> str:
    """Return an explanation of DDP's error `message` that names the unused parameters.

    Args:
        message: torch's message, with parameter indices.
        names: names of the reducer's parameters, in its order.
        rank: this rank.
    """
    found = _INDICES_WITHOUT_GRADIENT.search(message)
    indices = [int(index) for index in found.group(1).split()] if found else []
    # An index is out of range if parameters were unfrozen after the reducer was created.
    unused = [names[index] for index in indices if index < len(names)] or ["(torch does not say which)"]
    return (
        f"On rank {rank} these parameters did not contribute to the loss that the previous training_step returned, so "
        f"they got no gradients: {', '.join(unused)}. If that is intended, set `find_unused_parameters=True` (finds "
        "them in every step), or `static_graph=True` if they are the same in every step: "
        "`strategy=ParalDDPStrategy(find_unused_parameters=True)`. Otherwise make the loss depend on them, or freeze "
        "them with `requires_grad_(False)`."
    )
