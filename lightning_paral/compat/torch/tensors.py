"""Tensors without memory, storages and their files, operations of the dispatcher, and nested containers."""

import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_paral.compat.private_name import Names

__all__ = [
    "FOREACH",
    "TorchDispatchMode",
    "packet_of",
    "schema_of",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
]

NAMES: Names = {
    "pickle": {"_Unpickler": "read pickles with few opcodes, and limits for memory"},
    "torch.utils": {"_pytree": "find and replace the tensors among the arguments of an operation, and in a state"},
    "torch.UntypedStorage": {"_cdata": "distinguish storages without memory"},
    "torch._C": {"_storage_Use_Count": "know whether other tensors share the memory of a tensor"},
    "torch.Tensor": {"_make_wrapper_subclass": "make tensors that represent data in files or on other ranks"},
    "torch._subclasses.fake_tensor": {
        "FakeTensorMode": "reserve space in a file for tensors that no rank holds in full",
    },
    "torch.utils._python_dispatch": {"TorchDispatchMode": "intercept every operation"},
    "torch._ops.OpOverload": {
        "._schema": "know the arguments of an operation, and which of them it writes to",
    },
    "torch._C._functions.NllLossBackward0": {  # and NllLoss2DBackward0, made of the same formula
        "_saved_total_weight; _saved_reduction": "weigh losses of micro-batches by the targets that they do not ignore",
    },
}


# Nested containers

tree_flatten, tree_leaves, tree_unflatten = _pytree.tree_flatten, _pytree.tree_leaves, _pytree.tree_unflatten


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with each leaf replaced by what `function` returns for it."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(map(function, leaves), spec)


def tree_map_only(cls: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with each leaf of class `cls` replaced by what `function` returns for it."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, cls) else leaf, tree)


# Identity and reference counts of storages


identity_of: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""Return a number that identifies a storage as long as it exists."""


def use_count(tensor: Tensor) -> int:
    """Return the number of references to the storage of `tensor`: 2 if no other tensor shares it.

    The tensor itself and the storage object that this function creates count as one each.
    """
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def untyped(storage: object) -> UntypedStorage | None:
    """Return the untyped storage of `storage`, or `None` if it is not a storage."""
    if isinstance(storage, torch.storage.TypedStorage):
        with warnings.catch_warnings(action="ignore"):  # "TypedStorage is deprecated"
            storage = storage.untyped()  # type: ignore[no-untyped-call]
    return storage if isinstance(storage, UntypedStorage) else None


# The pickles of `torch.save`

PythonUnpickler: Any = pickle._Unpickler
"""Python's unpickler, written in Python: its `dispatch` has the opcodes. The one in C has no limits."""


# Create tensors of our own classes that have a shape but no memory


class WithoutMemory(Tensor):
    """The base of our classes of tensors that have a shape but no memory."""


T = TypeVar("T", bound=Tensor)


def without_memory(cls: type[T], shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> T:
    """Return a tensor of class `cls`, which must define `__torch_dispatch__`; `device=None` means CPU."""
    tensor: T = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
    return tensor


# Tensors without memory: to reserve space in a file, and to follow a training step without computing it


def fake_tensors(specs: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Return a tensor without memory for each shape and dtype, for `torch.serialization.skip_data`."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype) for shape, dtype in specs]


def fake_tensor_mode() -> Any:
    """Return a context in which new tensors have no memory, and operations compute shapes only.

    Inside, real tensors that an operation takes are treated as fake ones; `from_tensor` of the mode converts a tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def hide_accelerators() -> None:
    """Make torch see no accelerator for the rest of this process, a fork in which asking one raises an error.

    Optimizers ask before each step whether the stream of the device is being captured.
    """
    torch.cuda.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda *_, **__: None


def is_value_missing(error: BaseException) -> bool:
    """Return whether `error`, of `.item()`, may say that the tensor has no value."""
    return isinstance(error, RuntimeError)


# Operations of torch's dispatcher, and modes that intercept them

FOREACH = "_foreach_"
"""The prefix of the names of operations on lists of tensors."""

packet_of: Callable[[Any], Any] = attrgetter("overloadpacket")
"""Return the operation to which an overload belongs: `aten.mm` for `aten.mm.default`."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an operation, a `torch.FunctionSchema`."""


# What a cross entropy divides by

_MEAN = 1
"""`reduction="mean"`, as a node of the graph has it."""
_NUM_NODES = 32


def divisor_of(loss: Any) -> Any:
    """Return what the cross entropy, or `nll_loss`, that `loss` was computed from has divided its sum by.

    It is one with `reduction="mean"`. Of the graph, the nodes next to `loss` are searched, and the first one counts.

    Returns:
        The number of targets that are not ignored, or the sum of their class weights: a 0-dimensional tensor on the
        device of the loss. `None` if there is no cross entropy.
    """
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        if getattr(node, "_saved_reduction", None) == _MEAN and hasattr(node, "_saved_total_weight"):
            return node._saved_total_weight
        if len(nodes) < _NUM_NODES:
            nodes += [following for following, _ in getattr(node, "next_functions", ())]
    return None


class LossMean(torch.autograd.Function):
    """Divides a sum by a number of targets, which `divisor_of` finds as that of `nll_loss`."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor) -> Tensor:
        ctx._saved_reduction, ctx._saved_total_weight = _MEAN, count
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx._saved_total_weight, None
