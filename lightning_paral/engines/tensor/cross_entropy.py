"""The cross-entropy of logits of which each rank has some of the classes, without gathering them.

The sums over classes are sums over ranks, as in Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_paral.engines.tensor.collectives import gather_features, own_range, split_features


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of `torch.nn.functional.cross_entropy`, and how the classes are split."""

    size: int
    """The number of classes of all ranks."""

    group: dist.ProcessGroup
    """The ranks, which have the classes of their `own_range`."""

    ignore_index: int
    reduction: str
    """`"mean"`, `"sum"` or `"none"`."""

    label_smoothing: float

    @property
    def rows(self) -> slice:
        """The classes of this rank."""
        return own_range(self.size, self.group)


def split_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
    """Return `torch.nn.functional.cross_entropy` of the ranks' logits.

    *Collective* in the forward pass: a maximum of N numbers, and a sum of 2 N numbers, or 3 N with label smoothing. The
    backward pass has no collectives, except with `create_graph=True`, for which it gathers the logits. Logits of 16
    bits are computed with in float32. Between the passes, autograd keeps `logits` and a few tensors of N elements.

    Args:
        logits: this rank's part, of shape `[N, n]`. It may have no classes.
        target: class indices of shape `[N]` and dtype int64, equal on all ranks.
        weight: weights of all classes, of shape `[V]`, equal on all ranks.
        options: the other arguments.

    Returns:
        A scalar, or a tensor of shape `[N]` if `reduction="none"`, equal on all ranks. Its dtype is that of `logits`,
        or float32 under autocast.

    Raises:
        IndexError: a target is not a class. On CUDA, the kernel's assertion fails instead.
    """
    loss: Tensor = _SplitCrossEntropy.apply(logits, target, weight, options)  # type: ignore[no-untyped-call]
    return loss


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        weight = weight if weight is None else weight.to(dtype)
        counted = target != options.ignore_index
        is_own, positions = _positions(target, counted, options)
        has_classes = logits.shape[1] > 0

        highest = logits.amax(1).to(dtype) if has_classes else logits.new_full(target.shape, -torch.inf, dtype=dtype)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=options.group)
        shifted = logits - highest[:, None]  # in `dtype`
        at_target = shifted.gather(1, positions[:, None])[:, 0] if has_classes else torch.zeros_like(highest)
        sums = [at_target.masked_fill(~is_own, 0.0)]
        if options.label_smoothing > 0:
            sums.append((shifted if weight is None else shifted * weight[options.rows]).sum(1))
        sums.append(shifted.exp_().sum(1))
        summed = torch.stack(sums)
        dist.all_reduce(summed, group=options.group)

        exponentials = summed[-1]
        log_sum = exponentials.log()
        target_weight = _weights_of_targets(target, counted, weight, dtype)
        losses = target_weight * (log_sum - summed[0])
        if options.label_smoothing > 0:
            uniform = options.label_smoothing / options.size
            all_classes = _total(weight, options) * log_sum - summed[1]
            losses = (1 - options.label_smoothing) * losses + uniform * all_classes
        # Not a product: a loss that does not count may be infinite.
        losses = losses.masked_fill(~counted, 0.0)
        divisor = target_weight.sum() if options.reduction == "mean" else highest.new_ones(())
        if ctx.needs_input_grad[0]:
            ctx.options = options
            ctx.save_for_backward(logits, target, weight, highest, exponentials, divisor)
        loss = losses if options.reduction == "none" else losses.sum() / divisor
        is_cast = torch.is_autocast_enabled(logits.device.type)
        return loss if is_cast else loss.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, weight, highest, exponentials, divisor = ctx.saved_tensors
        options: LossOptions = ctx.options
        if torch.is_grad_enabled():
            # `once_differentiable` would return a constant, without an error, if `gradient` needs no gradient itself.
            return _differentiable_gradient(logits, target, weight, gradient, options), None, None, None
        counted = target != options.ignore_index
        is_own, positions = _positions(target, counted, options)
        # The loss of a row is: factor * log_sum - at_target * logit - uniform * sum(weight * logits).
        row = (gradient.to(highest.dtype) / divisor).expand(target.shape).masked_fill(~counted, 0.0)
        at_target = row * _weights_of_targets(target, counted, weight, highest.dtype) * (1 - options.label_smoothing)
        uniform = row * (options.label_smoothing / options.size)
        factor = at_target + uniform * _total(weight, options)

        result = (logits - highest[:, None]).exp_().mul_((factor / exponentials)[:, None])
        if options.label_smoothing > 0:
            if weight is None:
                result.sub_(uniform[:, None])
            else:
                result.addcmul_(uniform[:, None], weight[options.rows], value=-1.0)
        if logits.shape[1] > 0:
            result.scatter_add_(1, positions[:, None], -at_target.masked_fill(~is_own, 0.0)[:, None])
        return result.to(logits.dtype), None, None, None


def _differentiable_gradient(
    logits: Tensor, target: Tensor, weight: Tensor | None, gradient: Tensor, options: LossOptions
) -> Tensor:
    """Return the gradient of `logits`, for second derivatives. *Collective*, and again in its own backward pass."""
    full = gather_features(logits, options.size, options.group)
    wide = full.to(torch.promote_types(full.dtype, torch.float32))
    loss = functional.cross_entropy(
        wide,
        target,
        weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    (result,) = torch.autograd.grad(loss, full, gradient.to(loss.dtype), create_graph=True)
    return split_features(result, options.group)


def _positions(target: Tensor, counted: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return whether this rank has the class of each target, and its index among this rank's classes, or 0."""
    rows = options.rows
    is_wrong = counted & ((target < 0) | (target >= options.size))
    if target.device.type == "cpu" and is_wrong.any():
        raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds for {options.size} classes.")
    is_own = counted & (target >= rows.start) & (target < rows.stop)
    positions = (target - rows.start).masked_fill(~is_own, 0)
    # An index out of range makes the kernel fail, without a wait for the device here.
    return is_own, positions.masked_fill(is_wrong, rows.stop - rows.start)


def _weights_of_targets(target: Tensor, counted: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight of each target, 0 for those that do not count."""
    if weight is None:
        return counted.to(dtype)
    return weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0)


def _total(weight: Tensor | None, options: LossOptions) -> Tensor | int:
    """Return the sum of the weights of all classes."""
    return options.size if weight is None else weight.sum()
