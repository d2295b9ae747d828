"""The keywords of `ParalDDPStrategy`, with their documentation."""

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_paral.comm import WireDtype
from lightning_paral.engines.ddp.gradient_reduction import AllReduceName
from lightning_paral.engines.ddp.options import DDPOptions
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import check_at_least
from lightning_paral.options import takes_options


class DDPKeywords(DDPOptions, total=False):
    """The keywords of `ParalDDPStrategy`: its own, those of `RankOptions`, and those of `DistributedDataParallel`.

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
        model_averaging_period: as in Lightning's `DDPStrategy`, for post-local SGD: needs
            `ddp_comm_state=PostLocalSGDState(...)` and `ddp_comm_hook=post_localSGD_hook`.
    """

    all_reduce: AllReduceName
    wire_dtype: WireDtype | None
    gradient_as_bucket_view: bool
    ddp_comm_state: object | None
    ddp_comm_hook: Callable[..., Any] | None
    ddp_comm_wrapper: Callable[..., Any] | None
    model_averaging_period: int | None


_DEFAULTS: dict[str, Any] = {
    "all_reduce": "auto",
    "wire_dtype": None,
    "gradient_as_bucket_view": False,
    "ddp_comm_state": None,
    "ddp_comm_hook": None,
    "ddp_comm_wrapper": None,
    "model_averaging_period": None,
}
takes_ddp_options = takes_options(DDPKeywords, _DEFAULTS)
"""Decorate a constructor that takes `**keywords: Unpack[DDPKeywords]`: its signature lists our own keywords by name."""


def pop_own_keywords(keywords: Any) -> dict[str, Any]:
    """Remove the strategy's own keywords from `keywords`, and return them with their defaults.

    Raises:
        ConfigurationError: a value is unknown or out of range, or a period of averaging would do nothing.
    """
    own = {name: keywords.pop(name, default) for name, default in _DEFAULTS.items()}
    period, state, hook = own["model_averaging_period"], own["ddp_comm_state"], own["ddp_comm_hook"]
    check_at_least("ParalDDPStrategy", "model_averaging_period", period, 1)
    if period is not None and (hook is None or not isinstance(state, PostLocalSGDState)):
        raise ConfigurationError(
            f"ParalDDPStrategy(model_averaging_period={period}, ddp_comm_state={state!r}, ddp_comm_hook={hook!r}) "
            "would average weights that never differ, because gradients are averaged in every step. Leave it out, or "
            "train with post-local SGD: ddp_comm_state=PostLocalSGDState(...) and ddp_comm_hook=post_localSGD_hook."
        )
    return own
