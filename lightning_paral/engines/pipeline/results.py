"""Share what the last stage returns and logs in a step with the other stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_paral.comm.channel import Channel, with_tensors
from lightning_paral.compat.lightning.results import set_value_of_step, value_of_step
from lightning_paral.compat.torch.tensors import tree_map
from lightning_paral.data.parts import LogRecord, merge_logs
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.boundaries import Waiting
from lightning_paral.engines.pipeline.groups import PipelineGroups
from lightning_paral.errors import ConfigurationError


@dataclass(frozen=True)
class _Metric:
    """Stands for a metric of the module in a message."""

    name: str
    value_of_step: Any


@dataclass(frozen=True)
class _Number:
    """Stands for a number, which is sent in a tensor: it changes from step to step, unlike the rest of a message."""

    index: int


class StepResults:
    """Sends the results of the last stage to the other stages.

    Args:
        module: the LightningModule, which logs.
        dims: the arrangement of the ranks.
        groups: the process groups of the run; `None` if there is one stage.
        device: the device of this rank.
        waiting: returns a context that is entered while this rank waits for the last stage.
    """

    def __init__(
        self,
        module: LightningModule,
        dims: ParallelDims,
        groups: PipelineGroups | None,
        device: torch.device,
        waiting: Waiting,
    ) -> None:
        self._module = module
        self._device = device
        self.is_last = dims.stage == dims.pipeline - 1
        self._channels: list[Channel] = []
        if groups is not None:
            ranks = dims.pipeline_ranks
            peers = ranks[:-1] if self.is_last else ranks[-1:]
            self._channels = [Channel(groups.results, peer, device, waiting) for peer in peers]

    def share(self, output: Any, records: Sequence[LogRecord]) -> Any:
        """Log on all stages what the last stage has logged, and return its `output`. *Collective* over the pipeline.

        Args:
            output: on the last stage, what the step returns; tensors in it must not require gradients.
            records: on the last stage, what the step has logged for each part of the batch.
        """
        calls = list(merge_logs(records, self._device)) if self.is_last else []
        output, calls = self.share_value([output, calls])
        for arguments in calls:
            self._module.log(**arguments)
        return output

    def share_value(self, value: Any) -> Any:
        """Return the `value` of the last stage: nested tensors, metrics of the module, and objects that can be pickled.

        *Collective* over the pipeline.
        """
        if not self._channels:
            return value
        if not self.is_last:
            packed, numbers = with_tensors(*self._channels[0].receive())
            return tree_map(partial(self._unpacked, numbers=numbers.tolist()), packed)
        numbers = []
        packed = tree_map(partial(self._packed, numbers=numbers), value)
        for channel in self._channels:
            channel.send([packed, torch.tensor(numbers, dtype=torch.float64)])
        return value

    def finish(self) -> None:
        """Wait until everything is sent."""
        for channel in self._channels:
            channel.finish()

    def _packed(self, leaf: Any, numbers: list[float]) -> Any:
        if isinstance(leaf, Metric):
            name = next(name for name, part in self._module.named_modules() if part is leaf)
            return _Metric(name, value_of_step(leaf))
        if type(leaf) is float:
            numbers.append(leaf)
            return _Number(len(numbers) - 1)
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    def _unpacked(self, leaf: Any, numbers: list[float]) -> Any:
        if isinstance(leaf, _Number):
            return numbers[leaf.index]
        if not isinstance(leaf, _Metric):
            return leaf
        metric = self._module.get_submodule(leaf.name)
        assert isinstance(metric, Metric)
        if leaf.value_of_step is not None:
            set_value_of_step(metric, leaf.value_of_step)
        return metric


def loss_of(output: Any) -> Tensor:
    """Return the loss in what `training_step` has returned.

    Raises:
        ConfigurationError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"training_step returned {'None' if output is None else type(output).__name__} for a part of a batch. In a "
            "pipeline it must return a loss, or a dict with one under 'loss'. To skip a batch, return a loss that is "
            "zero, such as 0 * loss."
        )
    return loss
