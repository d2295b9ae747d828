"""Follow which operation of a step allocates which memory."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_paral.compat.torch.dispatch import TorchDispatchMode, packet_of
from lightning_paral.compat.torch.fake_tensors import is_value_missing
from lightning_paral.compat.torch.pytree import tree_leaves
from lightning_paral.compat.torch.storages import identity_of
from lightning_paral.planning.timeline import Kind, Moment

_MISSING_VALUE = "The module reads values of tensors, for example with .item(). They were taken as 1."


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a moment whenever an operation allocates memory, and whenever memory is freed.

    Memory of tensors that exist before is ignored until it is freed. Use it inside a fake tensor mode, which is entered
    first. Memory that an operation uses internally, such as the scratch memory of oneDNN, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[Moment] = []
        self.notes: set[str] = set()
        self._kind = Kind.ACTIVATION
        # By the address of a storage: kind, bytes, index. It is removed when the storage is freed.
        self._living: dict[int, tuple[Kind, int, int]] = {}
        self._parameters: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            if func is not torch.ops.aten._local_scalar_dense.default or not is_value_missing(error):
                raise
            self.notes.add(_MISSING_VALUE)
            return _one_of(args[0].dtype)
        count = flop_registry.get(packet_of(func))
        if count is not None:
            self.moments.append(Moment(Kind.COMPUTE, int(count(*args, **kwargs, out_val=out))))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        if func is torch.ops.aten._to_copy.default:
            index = self._parameters.get(identity_of(args[0].untyped_storage()))
            if index is not None:
                self.become([out], Kind.CAST, index)
        return out

    def ignore_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Do not record the memory of the parameters, but recognize copies of them."""
        for index, parameter in enumerate(parameters):
            self.ignore([parameter])
            self._parameters[identity_of(parameter.untyped_storage())] = index

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not record the memory of these tensors, which exist before the step."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._follow(storage, Kind.END, 0, -1)

    def enter_optimizer(self) -> None:
        """Count what follows as memory of the optimizer."""
        self.moments.append(Moment(Kind.OPTIMIZER))
        self._kind = Kind.TEMPORARY

    def leave_optimizer(self) -> None:
        """Count what follows as activations."""
        self.moments.append(Moment(Kind.END))
        self._kind = Kind.ACTIVATION

    def mark(self, kind: Kind, index: int = -1) -> None:
        """Record a moment that allocates nothing."""
        self.moments.append(Moment(kind, 0, index))

    def become_gradient(self, gradient: Tensor, index: int) -> None:
        """Count the memory of `gradient` as that of the gradient of parameter `index`, which is ready."""
        self.become([gradient], Kind.GRADIENT, index)
        self.moments.append(Moment(Kind.READY, number=index))

    def become(self, tensors: Iterable[Tensor], kind: Kind, index: int = -1) -> None:
        """Count the memory of `tensors` as another kind from now on."""
        for tensor in tensors:
            address = identity_of(tensor.untyped_storage())
            old = self._living.get(address)
            if old is None:
                self._see(tensor)
                old = self._living[address]
            if old[0] is kind:
                continue
            self._living[address] = (kind, old[1], index)
            if old[0] is not Kind.END:
                self.moments.append(Moment(old[0], -old[1], old[2]))
            if kind is not Kind.END:
                self.moments.append(Moment(kind, old[1], index))

    def _see(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if identity_of(storage) not in self._living:
            size = storage.nbytes()
            self._follow(storage, self._kind, size, -1)
            if size:
                self.moments.append(Moment(self._kind, size))

    def _follow(self, storage: Any, kind: Kind, size: int, index: int) -> None:
        address = identity_of(storage)
        if address in self._living:
            return
        self._living[address] = (kind, size or storage.nbytes(), index)
        # The Python object of a storage lives as long as its memory, even while only C++ holds it.
        weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        kind, size, index = self._living.pop(address)
        if kind is not Kind.END and size:
            self.moments.append(Moment(kind, -size, index))


def _one_of(dtype: torch.dtype) -> Any:
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
