"""The process groups of one run of a pipeline."""

import torch.distributed as dist

from lightning_paral.distributed.mesh import ParallelDims


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
