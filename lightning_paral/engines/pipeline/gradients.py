"""Keep the gradients of a step until its backward pass, add up those that several stages compute, and clip them."""

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.comm.coalescing import group_by_dtype_and_device
from lightning_paral.compat.torch.optimizers import foreach_mul_
from lightning_paral.engines.pipeline.calls import Pipeline
from lightning_paral.engines.pipeline.parameters import Shards, is_elsewhere
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.gradients import clip_by_norm, clip_by_value, gradient_norm, local_part

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")

_PLUGINS = (Precision, HalfPrecision, DoublePrecision, MixedPrecision)
_BUCKET_BYTES = 25 * 1024 * 1024


class StageGradients:
    """The gradients of the parameters of one stage.

    The backward passes of the micro-batches run inside `training_step`, after which Lightning may zero the gradients.
    `set_aside` therefore keeps those from before the step, `take` those of the step, and `deposit` adds these in the
    backward pass of the step's loss.

    Args:
        inside: the parameters that are on this stage only.
        outside: the parameters that are on all stages, each of which may compute a part of their gradients.
        pipeline: the pipeline of this rank.
        shards: the shards of these parameters; `None` if none is sharded.
    """

    def __init__(
        self,
        inside: Sequence[Parameter],
        outside: Sequence[Parameter],
        pipeline: Pipeline,
        shards: Shards | None = None,
    ) -> None:
        self._inside = dict.fromkeys(inside)
        self._outside = dict.fromkeys(outside)
        self._pipeline = pipeline
        self._dims = pipeline.dims
        self._shards = shards
        self._before: list[tuple[Parameter, Tensor | None]] = []
        self._of_step: list[tuple[Parameter, Tensor]] = []
        self._to_scatter: list[tuple[Parameter, Tensor]] = []
        """Shards, with the full gradients that this rank has computed."""
        self.accumulates = False
        """Whether `finish` leaves averaging over the data ranks to that of a later backward pass."""

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Take parameters that optimizers have got since the module was divided for ones that are on all stages."""
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            for each in group["params"]:
                if each not in self._inside and each not in self._outside and not is_elsewhere(each):
                    self._outside[each] = None

    def set_aside(self) -> None:
        """Remove all gradients, so that a step begins without any. In a step, shards get none."""
        full = (each for each in (*self._inside, *self._outside) if not isinstance(each, DTensor))
        self._before = [(parameter, parameter.grad) for parameter in full]
        for parameter, _ in self._before:
            parameter.grad = None

    def take(self) -> None:
        """Keep the gradients of the step, and restore those from before it."""
        self._of_step = [(parameter, parameter.grad) for parameter, _ in self._before if parameter.grad is not None]
        if self._shards is not None:
            self._of_step += self._shards.take_gradients()
        for parameter, gradient in self._before:
            parameter.grad = gradient
        self._before = []

    def attached_to(self, loss: Tensor, correction: float) -> Tensor:
        """Return a copy of `loss`, the same on all stages, whose backward pass deposits the gradients of the step.

        Args:
            loss: the loss of the step.
            correction: by what the gradients have to be multiplied.
        """
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        attached: Tensor = _Attached.apply(anchor, loss, self, correction)  # type: ignore[no-untyped-call]
        return attached

    @torch.no_grad()
    def deposit(self, factor: Tensor) -> None:
        """Add the gradients of the step, multiplied by `factor`, a 0-dimensional tensor, to those of the parameters.

        Full gradients of shards are kept for `finish`. Each stage computes a part of the gradients of parameters
        outside of the chain. They are scaled so that their mean over the stages is the gradient: averaging them again,
        in a later step, then changes nothing.
        """
        outside = self._outside
        of_step, self._of_step = self._of_step, []
        for scale, chosen in (
            (self._dims.pipeline, [pair for pair in of_step if pair[0] in outside]),
            (1, [pair for pair in of_step if pair[0] not in outside]),
        ):
            if factor.device.type != "cpu" or factor.item() * scale != 1.0:
                for group in group_by_dtype_and_device([gradient for _, gradient in chosen]):
                    foreach_mul_(group, (factor * scale).to(group[0].dtype))
        for parameter, gradient in of_step:
            if isinstance(parameter, DTensor):
                self._to_scatter.append((parameter, gradient))
            elif parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def finish(self) -> None:
        """Give shards the gradients that `deposit` has kept, and average gradients, unless they accumulate.

        *Collective* over the world. Call it after the backward pass of the step's loss: shards get gradients only then,
        because ranks with different numbers of samples have different factors.
        """
        if self._shards is not None:
            self._shards.scatter(self._to_scatter)
        if not self.accumulates:
            self._reduce()

    def _reduce(self) -> None:
        """Average the gradients over the data ranks, and those outside of the chain also over the stages. *Collective*.

        Those of shards are averaged over the ranks that hold the same shard. Parameters that have no gradient on any of
        these ranks keep none.
        """
        dims = self._dims
        for parameters, over_stages in ((self._outside, True), (self._inside, False)):
            shards: list[Parameter] = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
            full = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
            if dims.replicate > 1:
                _average(shards, dims.replicate, dims.replicate_group())
            if over_stages:
                _average(shards, dims.pipeline, self._pipeline.values)
            if over_stages and dims.num_ranks > 1:
                _average(full, dims.num_ranks, None)
            elif dims.data_size > 1:
                _average(full, dims.data_size, dims.data_group())

    def norm_of(self, parameters: Iterable[Parameter]) -> Tensor:
        """Return the 2-norm of the gradients of `parameters` and of those that other stages have. *Collective*."""
        parameters, outside = list(parameters), self._outside
        of_all = gradient_norm(parameter for parameter in parameters if parameter in outside)
        of_stage = gradient_norm(parameter for parameter in parameters if parameter not in outside)
        square = of_stage.square().double().to(self._pipeline.device)  # on the host if the stage has no gradients
        dist.all_reduce(square, group=self._pipeline.values)
        return (square + of_all.to(square.device).square()).sqrt().to(torch.promote_types(of_all.dtype, of_stage.dtype))


class StageClipping(Precision):
    """Mixin that averages the gradients of one stage, and clips them by the norm of all stages."""

    gradients: StageGradients | None = None
    """During a run, the gradients of this stage."""

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Average the gradients, which `on_after_backward` may then read. *Collective* over the world."""
        if self.gradients is not None:
            self.gradients.finish()
        return super().post_backward(tensor, module)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the total norm of the gradients of all stages. *Collective*."""
        assert self.gradients is not None
        clip_by_norm(self.main_params(optimizer), float(clip_val), self.gradients.norm_of)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip each element."""
        clip_by_value(self.main_params(optimizer), float(clip_val))


def stage_precision(plugin: Precision) -> Precision:
    """Return a copy of `plugin` for a pipeline.

    Raises:
        ConfigurationError: a pipeline does not support the precision.
    """
    if isinstance(plugin, StageClipping):
        return plugin
    cls = type(plugin)
    if cls not in _PLUGINS or plugin.precision not in PRECISIONS:
        raise ConfigurationError(
            f"{cls.__name__} (precision={plugin.precision!r}) cannot be used in a pipeline. Set "
            f"Trainer(precision=...) to one of {', '.join(PRECISIONS)}."
        )
    plugin = copy(plugin)
    plugin.__class__ = type(cls.__name__, (StageClipping, cls), {})
    return plugin


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: StageGradients, correction: float) -> Tensor:
        ctx.gradients, ctx.correction = gradients, correction
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        ctx.gradients.deposit(factor * ctx.correction)
        return None, None, None, None


@torch.no_grad()
def _average(parameters: list[Parameter], num_ranks: int, group: dist.ProcessGroup | None) -> None:
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        return
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    work = dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group, async_op=True)
    full = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    for similar in group_by_dtype_and_device([local_part(gradient) for gradient in full]):
        for bucket in _buckets(similar):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            if not flat.numel():
                continue
            dist.all_reduce(flat, group=group)
            averaged = torch.split(flat.div_(num_ranks), [gradient.numel() for gradient in bucket])
            for gradient, values in zip(bucket, averaged, strict=True):
                gradient.copy_(values.view_as(gradient))
    work.wait()
    for parameter, gradient, has in zip(parameters, full, has_gradient.tolist(), strict=True):
        if has:
            parameter.grad = gradient


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    ends = accumulate(gradient.numel() * gradient.element_size() for gradient in gradients)
    numbered = zip((end // _BUCKET_BYTES for end in ends), gradients, strict=True)
    return [[gradient for _, gradient in bucket] for _, bucket in groupby(numbered, key=itemgetter(0))]
