"""Keep the gradients of a step until its backward pass, add up those that several stages compute, and clip them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.comm.coalescing import all_reduce_mean, group_by_dtype_and_device
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.torch.optimizers import foreach_mul_
from lightning_paral.engines.pipeline.calls import Pipeline
from lightning_paral.engines.pipeline.parameters import Shards, StageParameters, is_elsewhere
from lightning_paral.model.gradients import clip_by_norm, clip_by_value, gradient_norm, local_part


class StageGradients:
    """The gradients of the parameters of one stage.

    The backward passes of the micro-batches run inside `training_step`, after which Lightning may zero the gradients.
    `of_step` therefore keeps those of the step, and `deposit` adds them in the backward pass of the step's loss.

    Args:
        parameters: those of this stage, and of all stages, each of which may compute a part of their gradients.
        pipeline: the pipeline of this rank.
        shards: the shards of these parameters; `None` if none is sharded.
    """

    def __init__(self, parameters: StageParameters, pipeline: Pipeline, shards: Shards | None) -> None:
        owner = parameters.owner
        self._inside = dict.fromkeys(each for each, stage in owner.items() if stage == pipeline.dims.stage)
        self._outside = dict.fromkeys(each for each in parameters.root.parameters() if each not in owner)
        self._pipeline = pipeline
        self._dims = pipeline.dims
        self._shards = shards
        self._of_step: list[tuple[Parameter, Tensor]] = []
        self._to_scatter: list[tuple[Parameter, Tensor]] = []
        """Shards, with the full gradients that this rank has computed."""
        self.accumulates = False
        """Whether `finish` leaves averaging over the data ranks to that of a later backward pass."""

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Take parameters that optimizers have got since the module was divided for ones that are on all stages."""
        for each in (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]):
            if each not in self._inside and each not in self._outside and not is_elsewhere(each):
                self._outside[each] = None

    def install(self, plugin: Precision, undo: ExitStack) -> None:
        """Make `plugin` average the gradients, before `on_after_backward`, and clip those of all stages, until `undo`.

        *Collective* over the world, as what `plugin` then does.
        """
        post_backward = plugin.post_backward

        def average(tensor: Tensor, module: Any) -> Tensor:
            self.finish()
            return post_backward(tensor, module)

        def clip(by: Callable[..., Any], optimizer: Optimizer, clip_val: int | float) -> None:
            by(plugin.main_params(optimizer), float(clip_val))

        shadow_method(plugin, "post_backward", average, undo)
        shadow_method(plugin, "clip_grad_by_norm", partial(clip, partial(clip_by_norm, norm_of=self.norm_of)), undo)
        shadow_method(plugin, "clip_grad_by_value", partial(clip, clip_by_value), undo)

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Begin without gradients, keep those of the backward passes inside the block, and restore those from before.

        Inside the block, shards get none.
        """
        full = [each for each in (*self._inside, *self._outside) if not isinstance(each, DTensor)]
        before = [(parameter, parameter.grad) for parameter in full]
        for parameter in full:
            parameter.grad = None
        try:
            yield
        finally:
            self._of_step = [(parameter, parameter.grad) for parameter in full if parameter.grad is not None]
            if self._shards is not None:
                self._of_step += self._shards.take_gradients()
            for parameter, gradient in before:
                parameter.grad = gradient

    def attached_to(self, loss: Tensor, correction: float) -> Tensor:
        """Return a copy of `loss`, the same on all stages, whose backward pass deposits the gradients of the step.

        Args:
            loss: the loss of the step.
            correction: by what the gradients have to be multiplied.
        """
        attached = loss + torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
        attached.register_hook(lambda factor: self.deposit(factor * correction))  # type: ignore[no-untyped-call]
        return attached

    @torch.no_grad()
    def deposit(self, factor: Tensor) -> None:
        """Add the gradients of the step, multiplied by `factor`, a 0-dimensional tensor, to those of the parameters.

        Full gradients of shards are kept for `finish`. Each stage computes a part of the gradients of parameters
        outside of the chain. They are scaled so that their mean over the stages is the gradient: averaging them again,
        in a later step, then changes nothing.
        """
        of_step, self._of_step = self._of_step, []
        for is_outside, scale in ((True, self._dims.pipeline), (False, 1)):
            if factor.device.type != "cpu" or factor.item() * scale != 1.0:
                chosen = (gradient for parameter, gradient in of_step if (parameter in self._outside) is is_outside)
                for group in group_by_dtype_and_device(chosen):
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

        Those outside of the chain are averaged over the stages as well. *Collective* over the world. Call it after the
        backward pass of the step's loss: shards get gradients only then, because ranks with different numbers of
        samples have different factors. Parameters that have no gradient on any of the ranks keep none.
        """
        if self._shards is not None:
            self._shards.scatter(self._to_scatter)
        if self.accumulates:
            return
        dims = self._dims
        for parameters in (self._outside, self._inside):
            shards: list[Parameter] = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
            full = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
            if parameters is self._outside:
                _average(shards, self._pipeline.values)
                _average(full, None)
            elif dims.data_size > 1:
                _average(full, dims.data_group())

    def norm_of(self, parameters: Iterable[Parameter]) -> Tensor:
        """Return the 2-norm of the gradients of `parameters` and of those that other stages have. *Collective*."""
        parameters, outside = list(parameters), self._outside
        of_all = gradient_norm(parameter for parameter in parameters if parameter in outside)
        of_stage = gradient_norm(parameter for parameter in parameters if parameter not in outside)
        square = of_stage.square().double().to(self._pipeline.device)  # on the host if the stage has no gradients
        dist.all_reduce(square, group=self._pipeline.values)
        return (square + of_all.to(square.device).square()).sqrt().to(torch.promote_types(of_all.dtype, of_stage.dtype))


@torch.no_grad()
def _average(parameters: list[Parameter], group: dist.ProcessGroup | None) -> None:
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters or dist.get_world_size(group) == 1:
        return
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    work = dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group, async_op=True)
    full = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    all_reduce_mean([local_part(gradient) for gradient in full], group)
    work.wait()
    for parameter, gradient, has in zip(parameters, full, has_gradient.tolist(), strict=True):
        if has:
            parameter.grad = gradient
