"""Share the attributes that steps have changed on the last stage, before hooks at the end of an epoch read them.

Such as the outputs that a module collects in a list: only the last stage runs a step to its end.
"""

import hashlib
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torchmetrics import Metric

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.torch.autograd import version_of
from lightning_paral.compat.torch.tensors import WithoutMemory
from lightning_paral.data.rollback import user_attributes
from lightning_paral.engines.pipeline.results import StepResults


class _Empty(LightningModule):
    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()


_OF_LIGHTNING = frozenset(vars(_Empty()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_Key = tuple[str, str]


class SharedAttributes:
    """Finds attributes of a module that hold data and have changed, and copies them to the other stages.

    Args:
        module: the LightningModule.
        results: sends the values.
        undo: a stack to which functions that undo the changes are pushed.
    """

    def __init__(self, module: LightningModule, results: StepResults, undo: ExitStack) -> None:
        self._module = module
        self._results = results
        self._known = self._fingerprints()
        self._warned: set[_Key] = set()
        trainer = module.trainer
        for loop, name in (
            (trainer.fit_loop, "on_advance_end"),
            (trainer.fit_loop.epoch_loop.val_loop, "on_run_end"),
            (trainer.validate_loop, "on_run_end"),
            (trainer.test_loop, "on_run_end"),
            (trainer.predict_loop, "on_run_end"),
        ):
            self._share_before(loop, name, undo)

    def share(self) -> None:
        """Give all stages the attributes that have changed on the last stage. *Collective* over the pipeline."""
        changed: dict[_Key, Any] = {}
        if self._results.is_last:
            now = self._fingerprints()
            attributes = dict(self._attributes())
            for key in now:
                if now[key] != self._known.get(key):
                    if now[key] is None:
                        self._warn(key)
                    else:
                        changed[key] = attributes[key]
            self._known = now
        shared = self._results.share_value(list(changed.items()))
        if not self._results.is_last:
            for (name, attribute), value in shared:
                vars(self._module.get_submodule(name))[attribute] = value

    def _share_before(self, loop: Any, name: str, undo: ExitStack) -> None:
        method = getattr(loop, name)

        def share_first(*args: Any, **kwargs: Any) -> Any:
            self.share()
            return method(*args, **kwargs)

        before = vars(loop).get(name)
        shadow_method(loop, name, share_first, None if before is not None else undo)
        if before is not None:
            undo.callback(vars(loop).__setitem__, name, before)

    def _attributes(self) -> Iterator[tuple[_Key, Any]]:
        for name, part in self._module.named_modules():
            if not isinstance(part, Metric):  # their states are read by `compute`, which the last stage runs
                for attribute, value in user_attributes(part).items():
                    if attribute not in _OF_LIGHTNING:
                        yield (name, attribute), value

    def _fingerprints(self) -> dict[_Key, Any]:
        return {key: fingerprint(value) for key, value in self._attributes()}

    def _warn(self, key: _Key) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(
                f"{'.'.join(filter(None, key))} has changed in the run, but it is not data that can be sent to the "
                "other stages of the pipeline, where it keeps its value."
            )


def fingerprint(value: Any) -> Any:
    """Return a value that changes with the data in `value`; `None` if `value` holds something other than data.

    Copies of shards and of weights of other stages do not count as data, because each stage has its own.
    """
    if isinstance(value, Parameter | Module):
        return ("fixed",)
    if isinstance(value, WithoutMemory | DTensor):
        return None
    if isinstance(value, Tensor):
        return "tensor", id(value), version_of(value), tuple(value.shape)
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, dict):
        items = [(fingerprint(key), fingerprint(item)) for key, item in value.items()]
        return None if any(None in pair for pair in items) else ("dict", tuple(items))
    if isinstance(value, list | tuple | deque | set | frozenset):
        prints = tuple(map(fingerprint, value))
        return None if None in prints else (type(value).__name__, prints)
    if type(value).__module__.partition(".")[0] == "numpy":
        return "numpy", hashlib.blake2b(pickle.dumps(value)).digest()
    return None
