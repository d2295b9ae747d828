"""Precision under FSDP2: dtypes of unsharded parameters and of reductions; clipping and loss scaling over shards."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Bilinear, GroupNorm, LayerNorm, Module
from torch.optim import Optimizer

from lightning_paral.compat.torch.optimizers import UnscalingGradScaler, check_and_unscale_
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.gradients import clip_by_norm, clip_by_value, local_gradients

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
ReduceDtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_COMPUTE_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ShardedScaler(UnscalingGradScaler):
    """A gradient scaler for shards: if the gradients of any rank are not finite, all ranks skip the step.

    torch's scaler checks only this rank's gradients, or fails if there are both DTensors and plain tensors.
    """

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients, and return whether those of any rank are not finite. *Collective*."""
        found = torch.zeros_like(found_inf)
        by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in local_gradients(p for group in optimizer.param_groups for p in group["params"]):
            by_type.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), gradients in by_type.items():
            here = torch.zeros_like(found, device=device)
            check_and_unscale_(gradients, here, inv_scale.to(device))
            found = torch.maximum(found, here.to(found.device))
        if dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {found.device: found}


class _ShardedClipping(Precision):
    """Mixin that clips sharded gradients."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the total norm of the gradients of all ranks. *Collective*."""
        clip_by_norm(self.main_params(optimizer), float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip each element."""
        clip_by_value(self.main_params(optimizer), float(clip_val))


class FSDPFullPrecision(_ShardedClipping):
    """`"32-true"`: weights, inputs, gradients and optimizer state in fp32."""


class FSDPHalfPrecision(_ShardedClipping, HalfPrecision):
    """`"bf16-true"` and `"16-true"`: weights, inputs, gradients and optimizer state in 16 bits."""


class FSDPDoublePrecision(_ShardedClipping, DoublePrecision):
    """`"64-true"`: weights, inputs, gradients and optimizer state in fp64."""


class FSDPMixedPrecision(_ShardedClipping, MixedPrecision):
    """`"bf16-mixed"` and `"16-mixed"`: fp32 shards, which are unsharded in 16 bits, and computation under autocast.

    Autocast runs the same operations in fp32 as under DDP, such as softmax, losses and sums. Without it, they would run
    in 16 bits.
    """


def sharded_precision(plugin: Precision) -> Precision:
    """Return the plugin for FSDP2 with the same precision as `plugin`.

    Raises:
        ConfigurationError: FSDP2 does not support the precision.
    """
    if isinstance(plugin, _ShardedClipping):
        return plugin
    if type(plugin) is Precision:
        return FSDPFullPrecision()
    if type(plugin) is HalfPrecision:
        return FSDPHalfPrecision(plugin.precision)
    if type(plugin) is DoublePrecision:
        return FSDPDoublePrecision()
    if type(plugin) is MixedPrecision:
        scaler = ShardedScaler(device=plugin.device) if plugin.precision == "16-mixed" else None
        return FSDPMixedPrecision(plugin.precision, plugin.device, scaler)  # type: ignore[arg-type]
    raise ConfigurationError(
        f"{type(plugin).__name__} (precision={plugin.precision!r}) cannot be used under FSDP. Set "
        f"Trainer(precision=...) to one of {', '.join(PRECISIONS)}."
    )


def check_precision(plugin: Precision, device: torch.device) -> None:
    """Raise a `ConfigurationError` if `plugin` does not work on `device`."""
    if isinstance(plugin, MixedPrecision) and plugin.precision == "16-mixed" and device.type != "cuda":
        raise ConfigurationError(
            f"precision='16-mixed' needs CUDA, but this rank is on {device.type!r}. Use precision='bf16-mixed'."
        )


def sharding_policy(plugin: Precision, reduce_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the dtypes in which parameters are unsharded and gradients reduced.

    Args:
        plugin: a precision plugin of this module.
        reduce_dtype: `None` reduces in fp32 under mixed precision, and in the weights' own dtype otherwise.
    """
    compute_dtype = _COMPUTE_DTYPES.get(str(plugin.precision))
    if compute_dtype is not None and reduce_dtype is None:
        reduce_dtype = torch.float32
    # Autocast casts inputs. FSDP2 would cast the whole batch, so that targets would lose precision as well.
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def match_inputs(module: Module) -> None:
    """Cast the inputs of layers that, on CPU, reject inputs with a wider dtype than their 16-bit weights."""
    for part in module.modules():
        if isinstance(part, LayerNorm | GroupNorm | Bilinear) and next(part.parameters(), None) is not None:
            part.register_forward_pre_hook(_cast_to_weight)


def _cast_to_weight(module: Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(_cast(value, dtype) for value in args)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
