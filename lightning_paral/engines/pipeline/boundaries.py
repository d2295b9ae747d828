"""Pass activations to the next stage, and their gradients back, within the autograd graphs of the stages."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_paral.comm.channel import Channel, TensorSpec, with_tensors
from lightning_paral.compat.torch.tensors import tree_flatten, tree_map_only
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.derivatives import THROUGH_STAGES
from lightning_paral.engines.pipeline.groups import PipelineGroups
from lightning_paral.errors import ConfigurationError

Waiting = Callable[[], AbstractContextManager[None]]
_PLAIN = bool | int | float | str | None


class Boundaries:
    """Connects a stage with the one before it and the one after it.

    Args:
        dims: the arrangement of the ranks.
        groups: the process groups of the run; `None` if there is one stage.
        device: the device of this rank.
        waiting: returns a context that is entered while this rank waits for another stage.
    """

    def __init__(
        self, dims: ParallelDims, groups: PipelineGroups | None, device: torch.device, waiting: Waiting
    ) -> None:
        self.before = self.after = None
        if groups is not None and dims.stage > 0:
            self.before = _Neighbor(dims, groups, device, dims.stage - 1, waiting)
        if groups is not None and dims.stage < dims.pipeline - 1:
            self.after = _Neighbor(dims, groups, device, dims.stage + 1, waiting)
        self._unanswered: ReceivedTensors | None = None
        self.is_in_backward = False
        """Set it during the backward passes of a step, in which alone gradients are sent."""
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def expect(self, num_micro_batches: int) -> None:
        """Prepare a training step, whose forward and backward passes send a message for each micro-batch.

        *Collective* over the pipeline.
        """
        for neighbor in (self.before, self.after):
            if neighbor is not None:
                neighbor.activations.expect(num_micro_batches)
                neighbor.gradients.expect(num_micro_batches)

    def receive(self) -> Any:
        """Return the output of the last unit of the stage before."""
        assert self.before is not None
        values, tensors = self.before.activations.receive()
        if isinstance(values, _Failure):
            raise ConfigurationError(values.message)
        specs = [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, TensorSpec)]
        trained = [number for number, spec in enumerate(specs) if spec.requires_grad]
        if trained:  # the stage before awaits gradients, also if the code around this unit computes none
            given = [tensors[number] for number in trained]
            received = ReceivedTensors(self.before.gradients, given, lambda: self.is_in_backward)
            with torch.enable_grad():
                received_tensors = _Receive.apply(self._anchor, received)  # type: ignore[no-untyped-call]
            for number, tensor in zip(trained, received_tensors, strict=True):
                tensors[number] = tensor
            self._unanswered = received
        return with_tensors(values, tensors)

    def send(self, output: Any, unit: str) -> Tensor:
        """Send `output`, and return a zero whose backward pass waits for the gradients of what was sent.

        Args:
            output: the output of the last unit of this stage.
            unit: the name of the unit, for error messages.

        Raises:
            ConfigurationError: `output` has values that cannot be sent.
        """
        assert self.after is not None
        leaves = tree_flatten(output)[0]
        unknown = next((leaf for leaf in leaves if not isinstance(leaf, Tensor | _PLAIN)), None)
        if unknown is not None:
            raise ConfigurationError(
                f"{unit} returns a {type(unknown).__name__}, which cannot be sent to the next stage of the pipeline. "
                "Return tensors, or tuples, lists or dicts of tensors and plain numbers."
            )
        if not torch.is_grad_enabled():
            output = tree_map_only(Tensor, Tensor.detach, output)
            leaves = tree_flatten(output)[0]
        self.after.activations.send(output)
        trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not trained:
            return torch.zeros((), device=self._anchor.device)
        zero: Tensor = _Send.apply(self.after.gradients, *trained)  # type: ignore[no-untyped-call]
        return zero

    def send_failure(self, message: str) -> None:
        """Make the stage after this one, which waits for the output of this one, raise an error, and so on."""
        if self.after is not None:
            self.after.activations.send(_Failure(message))

    def take_received(self) -> "ReceivedTensors | None":
        """Return what the last forward pass has received, whose gradients the stage before awaits."""
        received, self._unanswered = self._unanswered, None
        return received

    def finish(self) -> None:
        """Wait until everything is sent."""
        for neighbor in (self.before, self.after):
            if neighbor is not None:
                neighbor.activations.finish()
                neighbor.gradients.finish()
        self.expect(0)


@dataclass(frozen=True)
class _Failure:
    """Is sent instead of an output."""

    message: str


class _Neighbor:
    """The channels between this stage and another one, of which each has messages in one direction only."""

    def __init__(
        self, dims: ParallelDims, groups: PipelineGroups, device: torch.device, stage: int, waiting: Waiting
    ) -> None:
        peer = dims.pipeline_ranks[stage]
        self.activations = Channel(groups.activations, peer, device, waiting)
        self.gradients = Channel(groups.gradients, peer, device, waiting)


class ReceivedTensors:
    """Tensors from the stage before, which awaits their gradients."""

    def __init__(self, channel: Channel, tensors: list[Tensor], may_send: Callable[[], bool]) -> None:
        self._channel = channel
        self._may_send = may_send
        self._specs = [TensorSpec.of(tensor) for tensor in tensors]
        self.tensors = tensors
        self._is_answered = False

    def answer(self, gradients: Any) -> None:
        """Send the gradients to the stage before.

        Raises:
            ConfigurationError: the code of the user computes them, inside a step.
        """
        if not self._may_send():
            raise ConfigurationError(THROUGH_STAGES)
        self._is_answered = True
        self._channel.send_tensors(gradients)

    def answer_if_unused(self, device: torch.device) -> None:
        """Send zeros if the backward pass did not reach the tensors. Call this after the backward pass."""
        if not self._is_answered:
            self.answer([spec.empty(device).zero_() for spec in self._specs])


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: ReceivedTensors) -> Any:
        ctx.received = received
        tensors, received.tensors = received.tensors, []
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.received.answer(gradients)
        return None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channel: Channel, *tensors: Tensor) -> Tensor:
        ctx.gradients = channel.post_tensors([TensorSpec.of(tensor) for tensor in tensors])
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *ctx.gradients()
