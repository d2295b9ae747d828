"""Torch modes that create large tensors on the meta device and log the operations on them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.compat.torch.tensors import TorchDispatchMode, schema_of, tree_leaves, tree_map_only
from lightning_paral.model.deferred.op_log import OVERWRITING, OpLog, generator_state
from lightning_paral.model.hugging_face import is_placeholder

DEFERRED_BYTES = 64 * 1024
"""Tensors up to this size are not deferred, because that would save little, and code often reads their values."""

_to_copy = torch.ops.aten._to_copy.default
_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class MetaDisguise(TorchFunctionMode):
    """Makes deferred tensors report their future device, because `torch.nn.init` skips tensors on the meta device."""

    def __init__(self, log: OpLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        log, kwargs = self._log, kwargs or {}
        if log.is_repeating:
            return func(*args, **kwargs)
        if func == _SET_DATA and log.owns(args[0]) != log.owns(args[1]):
            return _set_data(*args)
        if func == _IS_META and log.owns(args[0]):
            return False
        if func == _DEVICE and log.owns(args[0]):
            return log.device_of(args[0])
        if func is Tensor.__deepcopy__ and log.owns(args[0]):
            return _deep_copy(*args)
        if func in _READING and log.owns(args[0]):
            return func(log.materialize([args[0]])[0], *args[1:], **kwargs)
        return func(*args, **kwargs)


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Assign `tensor.data = value` if only one of the two is on the meta device, which torch refuses to do."""
    other = Parameter(value.detach(), tensor.requires_grad) if isinstance(tensor, Parameter) else value.detach()
    vars(other).update(vars(tensor))
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _deep_copy(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    """Copy `tensor` by operations: torch's own method copies the storage, which the recorder does not see."""
    copied = tensor.detach().clone()
    memo[id(tensor)] = Parameter(copied, tensor.requires_grad) if isinstance(tensor, Parameter) else copied
    return memo[id(tensor)]


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
        if self._log.is_repeating:
            return func(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(type(tensor) not in (Tensor, Parameter) for tensor in tensors):
            return func(*args, **kwargs)
        owned = [tensor for tensor in tensors if self._log.owns(tensor)]
        makes = func is not _to_copy and any(argument.name == "device" for argument in schema_of(func).arguments)
        if makes and not (owned and kwargs.get("device") is None):
            return self._make(func, args, kwargs, has_template=bool(owned))
        if owned:
            return self._change(func, args, kwargs, owned)
        return func(*args, **kwargs)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_template: bool) -> Any:
        """Run an operation that creates a tensor; defer it unless the tensor is small."""
        device = torch.device(kwargs.get("device") or "cpu")
        if is_placeholder(device):
            return func(*args, **kwargs)
        meta = func(*_on_meta(args), **{**kwargs, "device": "meta"})
        if device.type == "meta":
            device = self._device
        elif not has_template and sum(part.nbytes for part in tree_leaves(meta)) <= DEFERRED_BYTES:
            return func(*args, **kwargs)
        kwargs = {**kwargs, "device": device}
        drawn_from = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_from = generator_state(kwargs.get("generator"), device)
            _draw(func, args, kwargs, device)
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
                _draw(func, args, kwargs, device)
            else:
                self._run_now(func, args, kwargs, owned)
        results = func(*_on_meta(args), **_on_meta(kwargs))
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
        real = dict(zip(map(id, owned), self._log.materialize(owned), strict=True))
        args, kwargs = tree_map_only(Tensor, lambda tensor: real.get(id(tensor), tensor), (args, kwargs))
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    arguments = schema_of(func).arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    for argument in arguments:
        if argument.name in given and argument.alias_info is not None and argument.alias_info.is_write:
            yield from (tensor for tensor in tree_leaves(given[argument.name]) if isinstance(tensor, Tensor))


def _on_meta(values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to("meta"), values)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
    """Run a random operation on memory without values: filling it draws the same random numbers."""

    def uninitialized(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    args, kwargs = tree_map_only(Tensor, uninitialized, (args, kwargs))
    func(*args, **kwargs)
