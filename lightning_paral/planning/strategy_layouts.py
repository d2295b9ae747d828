"""How a plan counts each engine with the options of a strategy object."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from lightning_paral.engines.fsdp.options import FSDPOptions
from lightning_paral.engines.zero.options import ZeROOptions
from lightning_paral.options import ActivationCheckpointing, Offload
from lightning_paral.planning.layout import AllReduce, Layout, Place

_UNCOUNTED_BY_FSDP = ("units", "min_params", "prefetch", "reduce_dtype")
_UNCOUNTED_BY_ZERO = ("overlap_comm", "gather_bucket_numel")
_ALL_REDUCES: dict[str, AllReduce] = {
    "ring": "ring",
    "reduce_broadcast": "reduce_broadcast",
    "all_to_all": "all_to_all",
}


def ddp_layout(all_reduce: str, wire_itemsize: int | None, options: Mapping[str, Any]) -> Layout:
    """Return the layout of DDP.

    Args:
        all_reduce: the algorithm, as in `ParalDDPStrategy(all_reduce=...)`.
        wire_itemsize: bytes per element on the wire; `None` for those of the gradients.
        options: options of `DistributedDataParallel`, and of communication hooks.
    """
    hook = options.get("ddp_comm_hook")
    averaging = options.get("model_averaging_period")
    return Layout(
        strategy="paral_ddp_ring" if all_reduce == "ring" else "paral_ddp",
        engine="ddp",
        all_reduce=_ALL_REDUCES.get(all_reduce, "default"),
        wire_itemsize=wire_itemsize,
        has_gradient_views=bool(options.get("gradient_as_bucket_view")),
        uncounted=(
            *(["ddp_comm_hook"] if hook is not None else []),
            *([f"model_averaging_period={averaging}"] if averaging is not None else []),
        ),
    )


def fsdp_layout(options: FSDPOptions) -> Layout:
    """Return the layout of FSDP."""
    place: Place = "host" if options.offload else "device"
    uncounted = list(_changed(options, _UNCOUNTED_BY_FSDP))
    if options.accumulate == "unsharded":
        uncounted.append("accumulate='unsharded'")
    if not isinstance(options.reshard_after_forward, bool) and options.reshard_after_forward is not None:
        uncounted.append(f"reshard_after_forward={options.reshard_after_forward}")
    return Layout(
        strategy="paral_fsdp_offload" if options.offload else "paral_fsdp",
        engine="fsdp",
        optimizer_place=place,
        parameter_place=place,
        replicas=options.replicate,
        reshards=options.reshard_after_forward is not False,
        uncounted=tuple(uncounted),
    )


def zero_layout(options: ZeROOptions) -> Layout:
    """Return the layout of ZeRO."""
    uncounted = list(_changed(options, _UNCOUNTED_BY_ZERO))
    if options.users_config:
        uncounted.append("deepspeed_config")
    for name in ("offload_optimizer", "offload_parameters"):
        offload: Offload | None = getattr(options, name)
        if offload is not None:
            counted = ("device", "path", "pin_memory", "buffer_count")
            names = [field.name for field in fields(Offload) if field.name not in counted]
            uncounted += [f"{name} with {option}" for option in _changed(offload, names)]
    return Layout(
        strategy=options.strategy_name,
        engine="zero",
        stage=options.stage,
        optimizer_place=_place(options.optimizer_offload),
        parameter_place=_place(options.parameter_offload),
        bucket_numel=options.reduce_bucket_numel,
        uncounted=tuple(uncounted),
    )


def with_recomputation(layout: Layout, checkpointing: ActivationCheckpointing | None) -> Layout:
    """Return `layout` with the option `activation_checkpointing` of a strategy."""
    if checkpointing is None:
        return layout
    names = [field.name for field in fields(checkpointing)]
    uncounted = tuple(f"activation_checkpointing with {option}" for option in _changed(checkpointing, names))
    return replace(layout.recomputing(), uncounted=layout.uncounted + uncounted)


def _changed(options: Any, names: Any) -> list[str]:
    """Return the options, such as `prefetch=2`, that do not have their defaults."""
    default = {field.name: field.default for field in fields(options)}
    return [f"{name}={getattr(options, name)!r}" for name in names if getattr(options, name) != default[name]]


def _place(offload: Offload | None) -> Place:
    if offload is None:
        return "device"
    return "host" if offload.device == "cpu" else "nvme"
