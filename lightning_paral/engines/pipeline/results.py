"""Share what the last stage returns, logs and collects with the other stages: only it runs a step to its end."""

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.utils.weak import WeakIdKeyDictionary
from torchmetrics import Metric

from lightning_paral.comm.channel import Channel, with_tensors
from lightning_paral.compat.lightning.loops import call_at_end_of_loader
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.results import set_value_of_step, value_of_step
from lightning_paral.compat.torch.autograd import identity_of
from lightning_paral.compat.torch.tensors import WithoutMemory, tree_leaves, tree_map
from lightning_paral.data.parts import LogRecord, merge_logs
from lightning_paral.data.rollback import user_attributes
from lightning_paral.engines.pipeline.calls import Pipeline
from lightning_paral.errors import ConfigurationError

_OF_LIGHTNING = frozenset(vars(LightningModule()))
_numbers = count()


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
        pipeline: the pipeline of this rank.
    """

    def __init__(self, module: LightningModule, pipeline: Pipeline) -> None:
        self._module = module
        self._device = pipeline.device
        self.is_last = pipeline.is_last
        ranks = pipeline.dims.pipeline_ranks
        peers = ranks[:-1] if self.is_last else ranks[-1:]
        self._follow_step = False
        """Whether the last message had the results of a step."""
        self._channels = [Channel(pipeline.results, peer, pipeline.device) for peer in peers]

    def expect(self) -> None:
        """Prepare to share the results of a step, which may be like those before. *Collective* over the pipeline."""
        if self._follow_step:
            for channel in self._channels:
                channel.post_next(receives=not self.is_last)

    def share(self, output: Any, records: Sequence[LogRecord]) -> Any:
        """Log on all stages what the last stage has logged, and return its `output`. *Collective* over the pipeline.

        Args:
            output: on the last stage, what the step returns; tensors in it must not require gradients.
            records: on the last stage, what the step has logged for each part of the batch.
        """
        calls = list(merge_logs(records, self._device)) if self.is_last else []
        output, calls = self.share_value([output, calls])
        self._follow_step = True
        for arguments in calls:
            self._module.log(**arguments)
        return output

    def share_value(self, value: Any) -> Any:
        """Return the `value` of the last stage: nested tensors, metrics of the module, and objects that can be pickled.

        *Collective* over the pipeline.
        """
        self._follow_step = False
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
        metric: Any = self._module.get_submodule(leaf.name)
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


class SharedAttributes:
    """Gives all stages the attributes that steps have changed, before hooks at the ends of epochs read them.

    Such as the outputs that a module collects in a list, and the states of metrics.

    Args:
        module: the LightningModule.
        results: sends the values.
        undo: a stack to which functions that undo the changes are pushed.
    """

    def __init__(self, module: LightningModule, results: StepResults, undo: ExitStack) -> None:
        self._module = module
        self._results = results
        self._known: dict[Any, Any] = {}
        """What was in the attributes before the steps, after hooks that all stages have run."""
        trainer = module.trainer
        evaluations = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
        for evaluation in evaluations:
            call_at_end_of_loader(evaluation, trainer, self.share, undo)
        for edge in ("start", "end"):
            self._share_before(trainer.fit_loop, f"on_advance_{edge}", undo)
            for loop in (*evaluations, trainer.predict_loop):
                self._share_before(loop, f"on_run_{edge}", undo)
        self._known = self._fingerprints()

    def share(self) -> None:
        """Give all stages the attributes that have changed on the last stage. *Collective* over the pipeline."""
        now, before = self._fingerprints(), self._known
        changed = [(key, value) for key, value in self._attributes() if now.get(key) not in (None, before.get(key))]
        shared = self._results.share_value(changed)
        if not self._results.is_last:
            for (name, attribute), value in shared:
                vars(self._module.get_submodule(name))[attribute] = value

    def _fingerprints(self) -> dict[Any, Any]:
        if not self._results.is_last:
            return {}
        return {key: _fingerprint(value) for key, value in self._attributes()}

    def _share_before(self, loop: Any, name: str, undo: ExitStack) -> None:
        method = getattr(loop, name)

        def share_first(*args: Any, **kwargs: Any) -> Any:
            self.share()
            result = method(*args, **kwargs)
            self._known = self._fingerprints()
            return result

        shadow_method(loop, name, share_first, undo)

    def _attributes(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for name, part in self._module.named_modules():
            for attribute, value in user_attributes(part).items():
                if attribute not in _OF_LIGHTNING:
                    yield (name, attribute), value


class _Data(pickle.Pickler):
    """Takes tensors by their identity, and refuses what each stage has its own of."""

    numbers = WeakIdKeyDictionary()
    """A number for each tensor that was seen. Unlike its id, no later tensor has it."""

    def persistent_id(self, each: Any) -> Any:
        if isinstance(each, Module | Parameter | WithoutMemory | DTensor):
            raise pickle.PicklingError
        if not isinstance(each, Tensor):
            return None
        number = self.numbers.setdefault(each, next(_numbers))  # type: ignore[no-untyped-call]
        return number, identity_of(each)[1]


def _fingerprint(value: Any) -> Any:
    """Return a value that changes with the data in `value`; `None` if it holds something other than data.

    Modules, parameters, shards and what cannot be pickled are no data.
    """
    digest = hashlib.blake2b()
    try:
        _Data(SimpleNamespace(write=digest.update)).dump(value)
    except Exception:  # of any type, because objects pickle themselves
        return None
    return digest.digest()
