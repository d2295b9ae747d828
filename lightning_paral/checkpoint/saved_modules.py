"""Save modules in a checkpoint as they would be without an engine: unsharded, and of their original class.

`self.save_hyperparameters()` records networks and losses that are arguments of the LightningModule, and
`on_save_checkpoint` may add any module, or objects that refer to one. Under FSDP and ZeRO, the parameters of modules
that are trained are sharded, their class is replaced, and they have hooks of the engine. None of it belongs in a file.
"""

import copyreg
import io
import pickle
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import numpy
import torch
from torch import Tensor, TypedStorage, UntypedStorage
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.shards import identity
from lightning_paral.checkpoint.tree import is_state_key
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.model.engine_attributes import (
    attributes_without_engine,
    class_without_engine,
    describes_shards,
)

_PLAIN = (str, bytes, int, float, bool, type(None), tuple)


def without_engines(
    checkpoint: dict[str, Any],
    parameters: Iterable[Parameter],
    full_parameter: Callable[[Parameter], Tensor],
    ranks: RankGroup,
) -> None:
    """Replace modules in `checkpoint`, wherever they are, by unsharded copies without hooks of an engine.

    Rank 0 gets the copies, on the host. On the other ranks, which save none, their parameters are empty.
    *Collective* over `ranks`.

    Args:
        checkpoint: the checkpoint in Lightning's format. Entries other than weights and optimizer states are replaced
            if any of them contains a module.
        parameters: all parameters that may be sharded, in the same order on all ranks.
        full_parameter: returns the full values of a parameter. *Collective* over `ranks`.
        ranks: the ranks that save together.

    Raises:
        CheckpointError: rank 0 could not pickle an entry. Raised on all ranks.
    """
    ordered, pickled = list(parameters), _Pickled()

    def find_parameters() -> list[int]:
        with nullcontext() if ranks.is_rank_0 else suppress(Exception):  # other ranks save none of it
            pickled.dump({key: value for key, value in checkpoint.items() if not is_state_key(key)})
        return [number for number, parameter in enumerate(ordered) if id(parameter) in pickled.tensors]

    found = ranks.gather_results("Saving", find_parameters)
    values: dict[int, Tensor] = {}
    for number in sorted({number for numbers in found for number in numbers}):
        value = full_parameter(ordered[number])
        values[id(ordered[number])] = value.detach().cpu() if ranks.is_rank_0 else value.new_empty(0)
    if pickled.differs:
        checkpoint.update(pickled.copy(values))


class _Pickled:
    """Pickled entries without tensors and arrays, and with modules as they would be without the engine."""

    differs = False
    """Whether they contain a module, or the output of one, on which an engine may have left something."""
    tensors: Collection[int] = ()
    """The ids of the tensors and arrays in them, if they differ."""

    def dump(self, given: dict[str, Any]) -> None:
        """Pickle `given`, the entries."""
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        try:
            pickler.dump(given)
        except Exception:
            if pickler.differs:
                raise
            return  # the save raises the error, unless it can write the entry
        self._data, self._objects, self.differs = buffer.getvalue(), pickler.objects, pickler.differs
        self.tensors = self._objects if self.differs else ()

    def copy(self, values: dict[int, Tensor]) -> dict[str, Any]:
        """Return a copy of the entries, which shares tensors with the original.

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
        self.differs = False

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor | numpy.ndarray | UntypedStorage | TypedStorage):
            return None
        self.objects[id(obj)] = obj
        self.differs |= getattr(obj, "grad_fn", None) is not None
        return id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DeviceMesh | ProcessGroup):  # of the run; such as `LightningModule.device_mesh`
            return type(None), ()
        if isinstance(obj, type) and issubclass(obj, Module) and (own := class_without_engine(obj)) is not obj:
            return identity, (own,)
        if not isinstance(obj, Module):
            return NotImplemented
        self.differs = True
        reduced = obj.__reduce_ex__(4)
        make, args, state, *rest = reduced if isinstance(reduced, tuple) and len(reduced) > 2 else (None, (), None)
        if make is None or not isinstance(state, dict):
            return reduced
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
        # ZeRO keeps hooks in attributes of the tensors that a step returns.
        return value if getattr(value, "grad_fn", None) is None else value.detach().requires_grad_()
    copied = Parameter(value.detach() if full is None else full, requires_grad=value.requires_grad)
    attributes = {name: kept for name, kept in vars(value).items() if isinstance(kept, _PLAIN)}
    own = {name: kept for name, kept in attributes.items() if not (name.startswith("_") or describes_shards(name))}
    vars(copied).update(own)
    return copied
