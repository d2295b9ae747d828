"""Torch modes that create large tensors on the meta device and log the operations on them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.compat.torch.tensors import TorchDispatchMode, schema_of, tree_flatten, tree_map
from lightning_paral.model.deferred.op_log import OVERWRITING, OpLog, View, generator_state
from lightning_paral.model.hugging_face import is_placeholder

DEFERRED_BYTES = 64 * 1024
"""Tensors up to this size are not deferred, because that would save little, and code often reads their values."""

_to_copy = torch.ops.aten._to_copy.default
_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_OVERRIDDEN = {_IS_META, _DEVICE, Tensor.__deepcopy__, Tensor.tolist, Tensor.numpy, Tensor.__array__}


class MetaDisguise(TorchFunctionMode):
    """Makes deferred tensors report their future device, because `torch.nn.init` skips tensors on the meta device."""

    def __init__(self, log: OpLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA and self._log.owns(args[0]) != self._log.owns(args[1]):
            return _set_data(*args)
        if func not in _OVERRIDDEN or not self._log.owns(args[0]):
            return func(*args, **kwargs)
        tensor = args[0]
        if func is _IS_META:
            return False
        if func is _DEVICE:
            return self._log.device_of(tensor)
        if func is Tensor.__deepcopy__:  # torch's own method copies the storage, which the recorder does not see
            copied = tensor.detach().clone()
            args[1][id(tensor)] = copied = (
                Parameter(copied, tensor.requires_grad) if isinstance(tensor, Parameter) else copied
            )
            return copied
        return func(self._log.materialize([View.of(tensor)])[0], *args[1:], **kwargs)


class Recorder(TorchDispatchMode):
    """Runs operations on large tensors on the meta device and logs them.

    If code reads values of such a tensor, it is materialized for this purpose.
    """

    def __init__(self, log: OpLog, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if any(type(tensor) not in (Tensor, Parameter) for tensor in tensors):
            return func(*args, **kwargs)
        owned = [tensor for tensor in tensors if self._log.owns(tensor)]
        makes = func is not _to_copy and any(argument.name == "device" for argument in schema_of(func).arguments)
        if makes and not (owned and kwargs.get("device") is None):
            return self._make(func, args, kwargs, templates=owned)
        if owned:
            return self._change(func, args, kwargs, owned)
        return func(*args, **kwargs)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], templates: list[Tensor]) -> Any:
        """Run an operation that creates a tensor; defer it unless the tensor is small."""
        device = torch.device(kwargs.get("device") or "cpu")
        if is_placeholder(device):
            return func(*args, **kwargs)
        meta = func(*tree_map(_on_meta, args), **{**kwargs, "device": "meta"})
        num_bytes = sum(part.numel() * part.element_size() for part in tree_flatten(meta)[0])
        if num_bytes <= DEFERRED_BYTES and device.type != "meta" and not templates:
            return func(*args, **kwargs)
        if device.type == "meta":
            device = self._device
        kwargs = {**kwargs, "device": device}
        drawn_from = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_from = generator_state(kwargs.get("generator"), device)
            func(*_uninitialized(args, device), **_uninitialized(kwargs, device))
        self._log.record(func, args, kwargs, meta, device, drawn_from, written=[])
        return meta

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owned: list[Tensor]) -> Any:
        """Run an operation on deferred tensors."""
        written = list(_written(func, args, kwargs))
        if self._needs_values(func, kwargs, written):
            return self._run_now(func, args, kwargs, owned)
        device = self._log.device_of(owned[0])
        drawn_from = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_from = generator_state(kwargs.get("generator"), device)
            if func.overloadpacket in OVERWRITING:
                func(*_uninitialized(args, device), **_uninitialized(kwargs, device))
            else:
                self._run_now(func, args, kwargs, owned)
        results = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        self._log.record(func, args, kwargs, results, device, drawn_from, written)
        return results

    def _needs_values(self, func: Any, kwargs: dict[str, Any], written: list[Tensor]) -> bool:
        if any(not self._log.owns(tensor) for tensor in written):
            return True  # the operation writes to a real tensor
        target = kwargs.get("device")
        if func is _to_copy and target is not None and torch.device(target).type != "meta":
            return True
        returns_tensors = any("Tensor" in str(result.type) for result in schema_of(func).returns)
        return not returns_tensors and not written

    def _run_now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owned: list[Tensor]) -> Any:
        values = self._log.materialize([View.of(tensor) for tensor in owned])
        real = {id(tensor): value for tensor, value in zip(owned, values, strict=True)}

        def present(value: Any) -> Any:
            return real.get(id(value), value) if isinstance(value, Tensor) else value

        return func(*tree_map(present, args), **tree_map(present, kwargs))


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Assign `tensor.data = value` if only one of the two is on the meta device, which torch refuses to do."""
    other = Parameter(value.detach(), tensor.requires_grad) if isinstance(tensor, Parameter) else value.detach()
    vars(other).update(vars(tensor))
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    positional = [argument for argument in schema_of(func).arguments if not argument.kwarg_only]
    named = {argument.name: argument for argument in schema_of(func).arguments}
    pairs = [*zip(args, positional, strict=False), *((value, named[name]) for name, value in kwargs.items())]
    for value, argument in pairs:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (tensor for tensor in tree_flatten(value)[0] if isinstance(tensor, Tensor))


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value


def _uninitialized(values: Any, device: torch.device) -> Any:
    """Replace meta tensors with uninitialized real tensors, because filling these draws the same random numbers."""

    def uninitialized(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        return value

    return tree_map(uninitialized, values)
