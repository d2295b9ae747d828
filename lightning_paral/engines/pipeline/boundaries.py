"""Pass activations to the next stage, and their gradients back, within the autograd graphs of the stages."""

from collections.abc import Sequence
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
        is_ring: whether the last stage also sends activations to the first one.
    """

    def __init__(self, dims: ParallelDims, *, is_ring: bool) -> None:
        ways = ("", " around") if is_ring else ("",)
        self.activations = [dims.new_pipeline_group(f"activations{way}") for way in ways]
        """For those between neighbors and, if there is a ring, from the last stage to the first one."""
        self.gradients = [dims.new_pipeline_group(f"gradients of activations{way}") for way in ways]
        self.results = dims.new_pipeline_group("results of steps")
        self.values = dims.new_pipeline_group("values")
        """For collectives, such as broadcasts of parameters."""

    def destroy(self) -> None:
        """Destroy the groups, once everything is received. *Collective* over the pipeline."""
        for group in (*self.activations, *self.gradients, self.results, self.values):
            dist.destroy_process_group(group)


class Boundaries:
    """Connects the parts of a stage with the parts before and after them, which other stages have.

    Args:
        dims: the arrangement of the ranks.
        groups: the process groups of the run; `None` if there is one stage.
        device: the device of this rank.
        parts: the numbers of the parts of this stage.
        num_parts: the number of parts of all stages.
    """

    def __init__(
        self,
        dims: ParallelDims,
        groups: PipelineGroups | None,
        device: torch.device,
        parts: Sequence[int],
        num_parts: int,
    ) -> None:
        self._activations: dict[int, Channel] = {}
        """By the number of the part that receives them."""
        self._gradients: dict[int, Channel] = {}
        """Those for activations, by the same number."""
        if groups is not None:
            ranks = dims.pipeline_ranks
            ends = [(part, part - 1) for part in parts if part > 0]
            ends += [(part + 1, part + 1) for part in parts if part + 1 < num_parts]
            for into, other in ends:
                peer, way = ranks[other % dims.pipeline], int(into % dims.pipeline == 0)
                self._activations[into] = Channel(groups.activations[way], peer, device, tag=into)
                self._gradients[into] = Channel(groups.gradients[way], peer, device, tag=into)
        self._unanswered: ReceivedTensors | None = None
        self.is_in_backward = False
        """Set it during the backward passes of a step, in which alone gradients are sent."""
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def expect(self, num_micro_batches: int) -> None:
        """Prepare a training step, whose forward and backward passes send a message for each micro-batch.

        *Collective* over the pipeline.
        """
        for channel in (*self._activations.values(), *self._gradients.values()):
            channel.expect(num_micro_batches)

    def receive(self, part: int) -> Any:
        """Return the output of the last unit before `part`, a part of this stage."""
        values, tensors = self._activations[part].receive()
        specs = [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, TensorSpec)]
        trained = [number for number, spec in enumerate(specs) if spec.requires_grad]
        if trained:  # the part before awaits gradients, also if the code around this unit computes none
            without_graph = [tensors[number] for number in trained]
            received = ReceivedTensors(self, self._gradients[part], without_graph)
            with torch.enable_grad():
                received_tensors = _Receive.apply(self._anchor, received)  # type: ignore[no-untyped-call]
            for number, tensor in zip(trained, received_tensors, strict=True):
                tensors[number] = tensor
            self._unanswered = received
        return with_tensors(values, tensors)

    def send(self, output: Any, part: int, unit: str) -> Tensor:
        """Send `output`, and return a zero whose backward pass waits for the gradients of what was sent.

        Args:
            output: the output of the last unit of `part`.
            part: the number of a part of this stage.
            unit: the name of the unit, for error messages.

        Raises:
            ConfigurationError: `output` has values that cannot be sent.
        """
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
        self._activations[part + 1].send(output)
        trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not trained:
            return torch.zeros((), device=self._anchor.device)
        zero: Tensor = _Send.apply(self._gradients[part + 1], *trained)  # type: ignore[no-untyped-call]
        return zero

    def take_received(self) -> "ReceivedTensors | None":
        """Return what the last forward pass has received, whose gradients the stage before awaits."""
        received, self._unanswered = self._unanswered, None
        return received

    def finish(self) -> None:
        """Wait until everything is sent."""
        for channel in (*self._activations.values(), *self._gradients.values()):
            channel.finish()
        self.expect(0)


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
