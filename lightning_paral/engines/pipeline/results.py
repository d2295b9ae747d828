"""Share what the last stage returns, logs and collects with the other stages: only it runs a step to its end."""

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torchmetrics import Metric

from lightning_paral.comm.channel import Channel, with_tensors
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.results import set_value_of_step, value_of_step
from lightning_paral.compat.torch.autograd import identity_of
from lightning_paral.compat.torch.tensors import WithoutMemory, tree_flatten, tree_leaves, tree_map
from lightning_paral.data.metrics import find_metrics
from lightning_paral.data.parts import LogRecord, merge_logs
from lightning_paral.data.rollback import user_attributes
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.boundaries import PipelineGroups
from lightning_paral.errors import ConfigurationError

_OF_LIGHTNING = frozenset(vars(LightningModule()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


@dataclass(frozen=True)
class _Metric:
    """Stands for a metric of the module in a message."""

    name: str
    value_of_step: Any


class _Float:
    """Stands for a float in a message."""


class StepResults:
    """Sends the results of the last stage to the other stages.

    Args:
        module: the LightningModule, which logs.
        dims: the arrangement of the ranks.
        groups: the process groups of the run; `None` if there is one stage.
        device: the device of this rank.
    """

    def __init__(
        self, module: LightningModule, dims: ParallelDims, groups: PipelineGroups | None, device: torch.device
    ) -> None:
        self._module = module
        self._device = device
        self.is_last = dims.stage == dims.pipeline - 1
        self._channels: list[Channel] = []
        if groups is not None:
            ranks = dims.pipeline_ranks
            peers = ranks[:-1] if self.is_last else ranks[-1:]
            self._channels = [Channel(groups.results, peer, device) for peer in peers]

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
            values, floats = with_tensors(*self._channels[0].receive())
            remaining = iter(floats.tolist())
            return tree_map(lambda leaf: next(remaining) if leaf is _Float else self._unpacked(leaf), values)
        # Floats that change are sent in a tensor. In the description, they would be a message more.
        floats = [leaf for leaf in tree_leaves(value) if type(leaf) is float]
        packed = tree_map(lambda leaf: _Float if type(leaf) is float else self._packed(leaf), value)
        for channel in self._channels:
            channel.send((packed, torch.tensor(floats, dtype=torch.float64)))
        return value

    def finish(self) -> None:
        """Wait until everything is sent."""
        for channel in self._channels:
            channel.finish()

    def _packed(self, leaf: Any) -> Any:
        if isinstance(leaf, Metric):
            name = next(name for name, part in self._module.named_modules() if part is leaf)
            return _Metric(name, value_of_step(leaf))
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    def _unpacked(self, leaf: Any) -> Any:
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


# Outside of steps


def share_values(
    roots: Iterable[object], results: StepResults, is_in_step: Callable[[], bool], undo: ExitStack
) -> None:
    """Make `compute` of the metrics in `roots` return the value of the last stage on all stages.

    Until `undo` is closed, `compute` is *collective* over the pipeline, except inside a step, which only the last stage
    runs to its end.

    Args:
        roots: the LightningModule and the callbacks.
        results: sends the values.
        is_in_step: returns whether a step of the module is running.
        undo: a stack to which functions that undo the changes are pushed.
    """
    computing: list[Metric] = []

    def share(metric: Metric) -> None:
        compute = metric.compute

        def compute_on_last() -> Any:
            if is_in_step() or computing:  # wrappers of metrics compute those that they contain
                return compute()
            if not results.is_last:
                return results.share_value(None)
            computing.append(metric)
            try:
                value = compute()
            finally:
                computing.clear()
            return results.share_value(value)

        shadow_method(metric, "compute", compute_on_last, undo)

    for metric in find_metrics(roots):
        if isinstance(metric, Metric):
            share(metric)


class SharedAttributes:
    """Gives all stages the attributes that steps have changed, before hooks at the end of an epoch read them.

    Such as the outputs that a module collects in a list.

    Args:
        module: the LightningModule.
        results: sends the values.
        undo: a stack to which functions that undo the changes are pushed.
    """

    def __init__(self, module: LightningModule, results: StepResults, undo: ExitStack) -> None:
        self._module = module
        self._results = results
        self._known = {key: _fingerprint(value) for key, value in self._attributes()}
        trainer = module.trainer
        evaluations = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
        self._share_before(trainer.fit_loop, "on_advance_end", undo)
        for loop in (*evaluations, trainer.predict_loop):
            self._share_before(loop, "on_run_end", undo)

    def share(self) -> None:
        """Give all stages the attributes that have changed on the last stage. *Collective* over the pipeline."""
        changed: list[Any] = []
        if self._results.is_last:
            for key, value in self._attributes():
                now = _fingerprint(value)
                if now is not None and now != self._known.get(key):
                    changed.append((key, value))
                self._known[key] = now
        shared = self._results.share_value(changed)
        if not self._results.is_last:
            for (name, attribute), value in shared:
                vars(self._module.get_submodule(name))[attribute] = value

    def _share_before(self, loop: Any, name: str, undo: ExitStack) -> None:
        method = getattr(loop, name)

        def share_first(*args: Any, **kwargs: Any) -> Any:
            self.share()
            return method(*args, **kwargs)

        shadow_method(loop, name, share_first, undo)

    def _attributes(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for name, part in self._module.named_modules():
            if not isinstance(part, Metric):  # their states are read by `compute`, which the last stage runs
                for attribute, value in user_attributes(part).items():
                    if attribute not in _OF_LIGHTNING:
                        yield (name, attribute), value


def _fingerprint(value: Any) -> Any:
    """Return a value that changes with the data in `value`; `None` if it holds something other than data.

    Copies of shards and of weights of other stages do not count as data, because each stage has its own.
    """
    leaves, structure = tree_flatten(value)
    if not all(isinstance(leaf, Tensor | Module) or _is_plain(leaf) for leaf in leaves):
        return None
    if any(isinstance(leaf, WithoutMemory | DTensor) and not isinstance(leaf, Parameter) for leaf in leaves):
        return None
    return structure, [_of_leaf(leaf) for leaf in leaves]


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a plain value, or an array or another container of them, such as a set or `Counter`."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)


def _of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Parameter | Module):
        return "fixed"
    if isinstance(leaf, Tensor):
        return *identity_of(leaf), tuple(leaf.shape)
    return hashlib.blake2b(pickle.dumps(leaf)).digest()
