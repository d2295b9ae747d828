"""Pass activations to the next stage, and their gradients back, within the autograd graphs of the stages."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.channel import Channel, TensorSpec, with_tensors
from lightning_paral.compat.torch.tensors import tree_flatten, tree_map_only
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError

_PLAIN = bool | int | float | str | None

THROUGH_STAGES = (
    "The code of a step computes gradients itself, such as by torch.autograd.grad or backward(), which may have to "
    "pass through units of an earlier stage. In a pipeline, each stage has the graph of its own units only, and the "
    "backward passes run after the step. A step can compute gradients by what the last unit returns, and by weights "
    "that are used after it only. For others, train with paral_ddp, or with paral_fsdp if they are not differentiated "
    "again."
)


class PipelineGroups:
    """Groups of the ranks of one pipeline, one for each kind of message, so that kinds do not wait for each other.

    They are created for each run. Creating them is *collective* over the pipeline.

    Args:
        dims: the arrangement of the ranks.
    """

    def __init__(self, dims: ParallelDims) -> None:
        self.activations = dims.new_pipeline_group("activations")
        self.gradients = dims.new_pipeline_group("gradients of activations")
        self.results = dims.new_pipeline_group("results of steps")
        self.values = dims.new_pipeline_group("values")
        """For collectives, such as broadcasts of parameters."""

    def destroy(self) -> None:
        """Destroy the groups, once everything is received. *Collective* over the pipeline."""
        for group in (self.activations, self.gradients, self.results, self.values):
            dist.destroy_process_group(group)


class Boundaries:
    """Connects a stage with the one before it and the one after it.

    Args:
        dims: the arrangement of the ranks.
        groups: the process groups of the run; `None` if there is one stage.
        device: the device of this rank.
    """

    def __init__(self, dims: ParallelDims, groups: PipelineGroups | None, device: torch.device) -> None:
        self.before = self.after = None
        if groups is not None and dims.stage > 0:
            self.before = _Neighbor(dims, groups, device, dims.stage - 1)
        if groups is not None and dims.stage < dims.pipeline - 1:
            self.after = _Neighbor(dims, groups, device, dims.stage + 1)
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
        specs = [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, TensorSpec)]
        trained = [number for number, spec in enumerate(specs) if spec.requires_grad]
        if trained:  # the stage before awaits gradients, also if the code around this unit computes none
            without_graph = [tensors[number] for number in trained]
            received = ReceivedTensors(self, self.before.gradients, without_graph)
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


class _Neighbor:
    """The channels between this stage and another one, of which each has messages in one direction only."""

    def __init__(self, dims: ParallelDims, groups: PipelineGroups, device: torch.device, stage: int) -> None:
        peer = dims.pipeline_ranks[stage]
        self.activations = Channel(groups.activations, peer, device)
        self.gradients = Channel(groups.gradients, peer, device)


class ReceivedTensors:
    """Tensors from the stage before, which awaits their gradients."""

    def __init__(self, boundaries: Boundaries, channel: Channel, tensors: list[Tensor]) -> None:
        self._boundaries = boundaries
        self._channel = channel
        self._specs = [TensorSpec.of(tensor) for tensor in tensors]
        self.tensors = tensors
        self._is_answered = False

    def answer(self, gradients: Any) -> None:
        """Send the gradients to the stage before.

        Raises:
            ConfigurationError: the code of the user computes them, inside a step.
        """
        if not self._boundaries.is_in_backward:
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
