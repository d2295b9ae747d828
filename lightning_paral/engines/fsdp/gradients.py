"""Gradients of shards: the precision in which they are computed and reduced, clipping, loss scaling and reductions."""

from copy import copy
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Bilinear, GroupNorm, LayerNorm, Module, Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_paral.comm.coalescing import all_reduce_mean, group_by_dtype_and_device
from lightning_paral.compat.torch.autograd import call_at_end_of_backward
from lightning_paral.compat.torch.optimizers import UnscalingGradScaler, foreach_mul_
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
        gradients = local_gradients(p for group in optimizer.param_groups for p in group["params"])
        for similar in group_by_dtype_and_device([each for each in gradients if each.numel() > 0]):
            largest = get_total_norm(similar, torch.inf)
            foreach_mul_(similar, inv_scale.to(largest.device))
            found = torch.maximum(found, largest.isfinite().logical_not().to(found))
        if dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {found.device: found}


def sharded_precision(plugin: Precision) -> Precision:
    """Return a plugin with the same precision as `plugin` that clips sharded gradients.

    `"bf16-mixed"` and `"16-mixed"` have fp32 shards, which are unsharded in 16 bits, and compute under autocast, which
    runs the same operations in fp32 as under DDP, such as softmax, losses and sums.

    Raises:
        ConfigurationError: FSDP2 does not support the precision.
    """
    if type(plugin) not in (Precision, HalfPrecision, DoublePrecision, MixedPrecision):
        raise ConfigurationError(
            f"{type(plugin).__name__} (precision={plugin.precision!r}) cannot be used under FSDP. Set "
            f"Trainer(precision=...) to one of {', '.join(PRECISIONS)}."
        )
    sharded: Any = copy(plugin)
    if plugin.precision == "16-mixed":
        users = sharded.scaler
        sharded.scaler = ShardedScaler(device=sharded.device, enabled=users.is_enabled())
        sharded.scaler.load_state_dict(users.state_dict())

    # Not local functions: code pickles what refers to the Trainer, such as progress bars.
    sharded.clip_grad_by_norm = partial(_clip_by_total_norm, sharded)
    sharded.clip_grad_by_value = partial(_clip_elements, sharded)
    return cast("Precision", sharded)


def _clip_by_total_norm(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
    clip_by_norm(plugin.main_params(optimizer), float(clip_val))


def _clip_elements(plugin: Precision, optimizer: Optimizer, clip_val: float) -> None:
    clip_by_value(plugin.main_params(optimizer), float(clip_val))


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

    def cast_to_weight(part: Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        dtype = next(part.parameters()).dtype
        is_float = [isinstance(value, Tensor) and value.is_floating_point() for value in args]
        return tuple(value.to(dtype) if cast else value for value, cast in zip(args, is_float, strict=True))

    for part in module.modules():
        if isinstance(part, LayerNorm | GroupNorm | Bilinear) and next(part.parameters(), None) is not None:
            part.register_forward_pre_hook(cast_to_weight)


# Reductions


class AveragedGradients:
    """Averages the gradients of replicated parameters over the data ranks at the end of each backward pass.

    Backward passes that only accumulate are averaged as well: averaging equal values again, in a later pass, changes
    nothing.

    Args:
        parameters: the parameters that are replicated on the data ranks.
        num_ranks: the number of data ranks.
        group: the process group of the data ranks; `None` for the world.
    """

    def __init__(self, parameters: list[Parameter], num_ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self._num_ranks = num_ranks
        self._group = group
        parameters = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        self._parameters = parameters
        self._queued = False
        self._handles = [_register_gradient_hook(parameter, self._queue_average) for parameter in parameters]

    def remove(self) -> None:
        """Stop averaging."""
        for handle in self._handles:
            handle.remove()

    def _queue_average(self, parameter: Tensor) -> None:
        if self._num_ranks > 1 and not self._queued:
            self._queued = True
            call_at_end_of_backward(self._average)

    def _average(self) -> None:
        self._queued = False
        all_reduce_mean([each.grad for each in self._parameters if each.grad is not None], self._group)


def _register_gradient_hook(parameter: Parameter, hook: object) -> torch.utils.hooks.RemovableHandle:
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses hooks on frozen parameters; this one may be unfrozen later
    handle: torch.utils.hooks.RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)
    return handle
