"""Offload the inputs of units to host memory between forward and backward, with copies that overlap computation.

`torch.autograd.graph.save_on_cpu` copies on the compute stream, which therefore waits for every copy, and it copies a
tensor that several units receive, such as a mask, once for each of them.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import local
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.weak import TensorWeakRef

from lightning_paral.compat.torch.autograd import version_of
from lightning_paral.errors import ConfigurationError

_MIN_BYTES = 2**16  # less is not worth a copy
_IN_FLIGHT = 2  # unit calls whose inputs stay on the device while they are copied


class OffloadedInputs:
    """Offloads the inputs that units save in forward to host memory. One object serves all units of a module.

    - Copies run on a separate stream. The GPU memory of a unit's inputs is freed when the second unit after it begins.
      Inputs that are still on the GPU at the end of forward are not copied back.
    - The backward pass of a unit starts copying back the inputs of the unit before it.
    - A tensor that several units receive is copied once. Parameters, small tensors and tensors in host memory are not
      copied.
    """

    def __init__(self) -> None:
        self._forward = _ForwardState()
        self._streams: dict[torch.device, Any] = {}

    def saving_inputs(self) -> saved_tensors_hooks:
        """Return the context in which to call a unit; each call needs a new one."""
        self._forward.begin_call()
        return saved_tensors_hooks(self._pack, self._unpack)

    def is_offloaded(self, tensor: Tensor) -> bool:
        """Return whether tensors on the device of `tensor` and of its size are offloaded."""
        return tensor.device.type == "cuda" and tensor.nbytes >= _MIN_BYTES

    def _pack(self, tensor: Tensor) -> "_NotOffloaded | _Offloaded":
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_inference()
        is_expanded = is_plain and tensor.untyped_storage().nbytes() < tensor.nbytes
        if isinstance(tensor, Parameter) or not is_plain or is_expanded or not self.is_offloaded(tensor):
            return _NotOffloaded(tensor, _version(tensor))
        state = self._forward
        known = state.known(tensor)
        if known is not None:
            known.num_uses += 1
            return known
        self._free_copied()
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        kept = _Offloaded(host, tensor.device, state.call, state.last, tensor, _version(tensor))
        kept.copied = self._copy(host, tensor.detach(), tensor.device)
        state.add(tensor, kept)
        return kept

    def _free_copied(self) -> None:
        """Free the GPU inputs of earlier units, after making the compute stream wait for their copies."""
        state = self._forward
        while state.in_flight:
            kept = state.in_flight[0]()
            if kept is not None and kept.call > state.call - _IN_FLIGHT:
                break
            state.in_flight.popleft()
            if kept is not None and kept.original is not None:
                _check_unchanged(kept.original, kept.version)
                self._wait(kept.copied, kept.device)  # nothing may reuse the memory before the copy has ended
                kept.original = None

    def _unpack(self, packed: "_NotOffloaded | _Offloaded") -> Tensor:
        if isinstance(packed, _NotOffloaded):
            _check_unchanged(packed.tensor, packed.version)
            return packed.tensor
        value = packed.original
        if value is not None:
            _check_unchanged(value, packed.version)
        else:
            self._fetch(packed)
            value = packed.fetched
            assert value is not None
            self._wait(packed.arrived, packed.device)
        packed.num_uses -= 1
        if packed.num_uses <= 0:  # otherwise other units still need it
            self._wait(packed.copied, packed.device)
            packed.original = packed.fetched = None
            self._fetch_before(packed)
        return value

    def _fetch_before(self, packed: "_Offloaded") -> None:
        """Start copying back the other inputs of the same unit, and those of the unit before it."""
        before = packed.before
        while before is not None and (kept := before()) is not None and kept.call >= packed.call - 1:
            if kept.num_uses > 0:
                self._fetch(kept)
            before = kept.before

    def _fetch(self, kept: "_Offloaded") -> None:
        """Start copying `kept` back, if it is only in host memory."""
        if kept.original is not None or kept.fetched is not None:
            return
        kept.fetched = torch.empty_like(kept.host, device=kept.device)
        kept.arrived = self._copy(kept.fetched, kept.host, kept.device)
        if kept.fetched.is_cuda:  # the tensor may be freed before any stream has waited for the copy
            kept.fetched.record_stream(self._streams[kept.device])

    @torch.no_grad()
    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> Any:
        """Start a copy that waits for all work queued so far; return an event at its end, or `None` on CPU."""
        with self._on_stream(device) as stream:
            target.copy_(source, non_blocking=True)
            return None if stream is None else stream.record_event()

    def _on_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type != "cuda":
            return nullcontext()
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return _Current(stream)

    def _wait(self, event: Any, device: torch.device) -> None:
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)


class _Current:
    """Context manager that makes a stream the current one; `__enter__` returns the stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._context: Any = torch.cuda.stream(stream)

    def __enter__(self) -> Any:
        self._context.__enter__()
        return self._stream

    def __exit__(self, *raised: Any) -> None:
        self._context.__exit__(*raised)


@dataclass
class _NotOffloaded:
    """A saved tensor that is not offloaded."""

    tensor: Tensor
    version: int


@dataclass(eq=False)
class _Offloaded:
    """A saved tensor with a copy in host memory. The autograd graph owns this object; other references are weak."""

    host: Tensor
    device: torch.device
    call: int
    """The number of the unit call that saved it."""
    before: "ref[_Offloaded] | None"
    """The tensor offloaded before this one."""
    original: Tensor | None
    """The tensor itself, until it is freed."""
    version: int
    num_uses: int = 1
    """How many times the backward pass will unpack it."""
    copied: Any = None
    """The event at the end of the copy to host memory."""
    fetched: Tensor | None = None
    """The copy back on the device."""
    arrived: Any = None
    """The event at the end of the copy back to the device."""


class _ForwardState(local):
    """The tensors that this thread has offloaded. With several devices in a process, each device has its own thread."""

    def __init__(self) -> None:
        self.call = 0
        self.last: ref[_Offloaded] | None = None
        self.in_flight: deque[ref[_Offloaded]] = deque()
        self._known: dict[int, tuple[Any, ref[_Offloaded]]] = {}

    def begin_call(self) -> None:
        self.call += 1
        alive = {key: found for key, found in self._known.items() if found[1]() is not None and found[0]() is not None}
        self._known = alive

    def known(self, tensor: Tensor) -> _Offloaded | None:
        """Return the existing copy of `tensor`, if `tensor` has not been written to since."""
        tensor_ref, kept_ref = self._known.get(id(tensor), (None, None))
        if tensor_ref is None or kept_ref is None or tensor_ref() is not tensor:
            return None
        kept = kept_ref()
        return kept if kept is not None and kept.version == _version(tensor) else None

    def add(self, tensor: Tensor, kept: _Offloaded) -> None:
        self.last = ref(kept)
        self.in_flight.append(self.last)
        self._known[id(tensor)] = TensorWeakRef(tensor), self.last


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if _version(tensor) != version:
        raise ConfigurationError(
            f"An input of a unit, a tensor of shape {tuple(tensor.shape)}, was changed in place after the unit had "
            "received it. Activation checkpointing recomputes the unit from its inputs, and would get a different "
            "result. Change a copy: `x = x + y`, not `x += y`."
        )
