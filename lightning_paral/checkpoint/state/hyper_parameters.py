"""Save modules in the hyper-parameters as they would be without an engine: unsharded, and of their original class.

`self.save_hyperparameters()` also records networks and losses that are arguments of the LightningModule, and Lightning
saves them in the checkpoint. They are the modules that are trained: under FSDP and ZeRO, their parameters are sharded,
their class is replaced, and they have hooks of the engine, none of which belongs in a file.
"""

import copyreg
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError
from lightning_paral.model.engine_attributes import (
    attributes_without_engine,
    class_without_engine,
    describes_shards,
)

_KEYS = ("hyper_parameters", "datamodule_hyper_parameters")
_PLAIN = (str, bytes, int, float, bool, type(None), tuple)


def unshard_hyper_parameters(
    checkpoint: dict[str, Any],
    parameters: Iterable[Parameter],
    full_parameter: Callable[[Parameter], Tensor],
    ranks: RankGroup,
) -> None:
    """Replace modules in the hyper-parameters of `checkpoint` by unsharded copies without hooks.

    Rank 0 gets the copies, on the host. The other ranks do not save hyper-parameters, and get empty dicts.
    *Collective* over `ranks`.

    Args:
        checkpoint: the checkpoint in Lightning's format. Its hyper-parameters are replaced if they contain modules.
        parameters: all parameters that may be sharded, in the same order on all ranks.
        full_parameter: returns the full values of a parameter. *Collective* over `ranks`.
        ranks: the ranks that save together.

    Raises:
        CheckpointError: ranks have different modules in their hyper-parameters.
    """
    given = {key: checkpoint[key] for key in _KEYS if checkpoint.get(key)}
    if not given:
        return
    pickled = _PickledHyperParameters(given)
    ordered = list(parameters)
    wanted = [number for number, parameter in enumerate(ordered) if id(parameter) in pickled.tensors]
    found = ranks.gather((pickled.has_modules, wanted))
    if any(each != found[0] for each in found):
        raise CheckpointError(
            "The modules in the hyper-parameters differ between ranks, so they cannot be saved. Pass the same "
            "arguments to the LightningModule on all ranks, or exclude them: `self.save_hyperparameters(ignore=[...])`."
        )
    if not pickled.has_modules:
        return
    values: dict[int, Tensor] = {}
    for number in wanted:
        value = full_parameter(ordered[number])
        if ranks.is_rank_0:
            values[id(ordered[number])] = value.detach().cpu()
    checkpoint.update(pickled.copy(values) if ranks.is_rank_0 else {key: {} for key in given})


class _PickledHyperParameters:
    """Pickled hyper-parameters without tensors and arrays, and with modules as they would be without the engine."""

    def __init__(self, given: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        try:
            pickler.dump(given)
        except Exception:  # hyper-parameters that cannot be pickled cannot be saved: the save raises the error
            pickler.has_modules = False
        self._data = buffer.getvalue()
        self._objects = pickler.objects
        self.has_modules = pickler.has_modules
        self.tensors = set(self._objects) if self.has_modules else set()

    def copy(self, values: dict[int, Tensor]) -> dict[str, Any]:
        """Return a copy of the hyper-parameters, which shares tensors with the original.

        Args:
            values: full values by the ids of the parameters that they replace.
        """
        objects = {key: _copy_object(value, values.get(key)) for key, value in self._objects.items()}
        unpickler = _Unpickler(io.BytesIO(self._data), objects)
        copied: dict[str, Any] = unpickler.load()
        return copied


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=4)
        self.objects: dict[int, Any] = {}
        self.has_modules = False

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor | numpy.ndarray):
            return None
        self.objects[id(obj)] = obj
        return id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Module):
            return NotImplemented
        self.has_modules = True
        reduced = obj.__reduce_ex__(4)
        make, args, state, *rest = reduced if isinstance(reduced, tuple) and len(reduced) > 2 else (None, (), None)
        if make is None or not isinstance(state, dict):
            return reduced
        args = tuple(class_without_engine(arg) if arg is type(obj) else arg for arg in args)
        # With `__newobj__`, pickle accepts only the actual class of the object, so replace it by `_new`.
        return (_new if make is copyreg.__newobj__ else make, args, attributes_without_engine(state, type(obj)), *rest)  # type: ignore[attr-defined]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, objects: dict[int, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid]


def _new(cls: type, *args: Any) -> Any:
    return cls.__new__(cls, *args)


@torch.no_grad()
def _copy_object(value: Any, full: Tensor | None) -> Any:
    if not isinstance(value, Parameter):
        return value
    copied = Parameter(value.detach() if full is None else full, requires_grad=value.requires_grad)
    attributes = {name: kept for name, kept in vars(value).items() if isinstance(kept, _PLAIN)}
    own = {name: kept for name, kept in attributes.items() if not (name.startswith("_") or describes_shards(name))}
    vars(copied).update(own)
    return copied
