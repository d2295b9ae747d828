"""Keep the gradients of a step until its backward pass, and add up those that several stages compute."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_paral.comm.coalescing import group_by_dtype_and_device
from lightning_paral.compat.torch.optimizers import foreach_mul_
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.boundaries import PipelineGroups
from lightning_paral.engines.pipeline.parameters import Shards
from lightning_paral.model.gradients import gradient_norm, local_part

_BUCKET_BYTES = 25 * 1024 * 1024


class StageGradients:
    """The gradients of the parameters of one stage.

    The backward passes of the micro-batches run inside `training_step`, after which Lightning may zero the gradients.
    `set_aside` therefore keeps those from before the step, `take` those of the step, and `deposit` adds these in the
    backward pass of the step's loss.

    Args:
        inside: the parameters that are on this stage only.
        outside: the parameters that are on all stages, each of which may compute a part of their gradients.
        dims: the arrangement of the ranks.
        groups: the process groups of the run; `None` if there is one stage.
        device: the device of this rank.
        shards: the shards of these parameters; `None` if none is sharded.
    """

    def __init__(
        self,
        inside: Sequence[Parameter],
        outside: Sequence[Parameter],
        dims: ParallelDims,
        groups: PipelineGroups | None,
        device: torch.device,
        shards: Shards | None = None,
    ) -> None:
        self._device = device
        self._inside = list(inside)
        self._outside = list(outside)
        self._dims = dims
        self._groups = groups
        self._shards = shards
        self._before: list[tuple[Parameter, Tensor | None]] = []
        self._of_step: list[tuple[Parameter, Tensor]] = []
        self._to_scatter: list[tuple[Parameter, Tensor]] = []
        """Shards, with the full gradients that this rank has computed."""
        self.accumulates = False
        """Whether `finish` leaves averaging over the data ranks to that of a later backward pass."""
        self.are_read_while_accumulating = False
        """Whether hooks may read them then. `finish` averages them over the stages in that case."""

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
        outside = set(self._outside)
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
        """Give shards the gradients that `deposit` has kept, and average gradients.

        While gradients accumulate, average them over the stages only, if hooks may read them.

        *Collective* over the world. Call it after the backward pass of the step's loss: shards get gradients only then,
        because ranks with different numbers of samples have different factors.
        """
        if self._shards is not None:
            self._shards.scatter(self._to_scatter)
        if not self.accumulates:
            self._reduce()
        elif self.are_read_while_accumulating and self._groups is not None:
            _average(self._outside, self._dims.pipeline, self._groups.values)

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
            if over_stages and self._groups is not None:
                _average(shards, dims.pipeline, self._groups.values)
            if over_stages and dims.num_ranks > 1:
                _average(full, dims.num_ranks, None)
            elif dims.data_size > 1:
                _average(full, dims.data_size, dims.data_group())

    def norm_of(self, parameters: Iterable[Parameter]) -> Tensor:
        """Return the 2-norm of the gradients of `parameters` and of those that other stages have. *Collective*."""
        parameters, outside = list(parameters), set(self._outside)
        of_all = gradient_norm(parameter for parameter in parameters if parameter in outside)
        of_stage = gradient_norm(parameter for parameter in parameters if parameter not in outside)
        square = of_stage.square().double().to(self._device)  # on the host if the stage has no gradients
        if self._groups is not None:
            dist.all_reduce(square, group=self._groups.values)
        return (square + of_all.to(square.device).square()).sqrt().to(torch.promote_types(of_all.dtype, of_stage.dtype))


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
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    gradients: list[Tensor] = []
    for parameter, has in zip(parameters, has_gradient.tolist(), strict=True):
        if has and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif has and parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        if parameter.grad is not None:
            gradients.append(local_part(parameter.grad))
    for similar in group_by_dtype_and_device(gradients):
        for bucket in _buckets(similar):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            if not flat.numel():
                continue
            dist.all_reduce(flat, group=group)
            flat.div_(num_ranks)
            for gradient, averaged in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(averaged.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    ends = accumulate(gradient.numel() * gradient.element_size() for gradient in gradients)
    numbered = zip((end // _BUCKET_BYTES for end in ends), gradients, strict=True)
    return [[gradient for _, gradient in bucket] for _, bucket in groupby(numbered, key=itemgetter(0))]
