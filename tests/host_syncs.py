"""Count the calls that would make the host wait for a GPU, in tests where every device is the host.

Seen are functions of torch, by patches, which act on every thread, and operations, by a mode, which acts on the calling
thread, in the backward passes that it starts, and on threads that start meanwhile. So values that C++ reads are seen,
too: those that `tensor[mask]`, `torch.where(condition)` or an index that is a tensor need.

Not seen, since there is only one device:

- a move or `copy_` from one device to another, unless `Tensor.to` is told the host by name: the string `"cpu"`, or a
  `torch.device` of it where the calling function holds that string, or its module a constant that is this object.
  `square.to(other.device)` and `on_host.copy_(tensor)` wait if the devices differ, as they may under offloading;
- a copy from the host: `torch.tensor(number, device=device)`, an index that is a list or on the host;
- `tensor[mask] = value` with a `value` of one element: a number needs no wait, but a tensor of the device does;
- waits for streams, events and collectives, and what copies memory itself, as `torch.save` and object collectives do.

`tests/gpu/syncs.py` counts real waits, these included.
"""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_paral

OURS = str(Path(lightning_paral.__file__).parent) + "/"
OTHERS = ("/lightning/", "/deepspeed/", "/torch/optim/", "/torchmetrics/", "/tests/")
"""Code that is held responsible for its calls of torch. Other code in torch is called on behalf of these."""

_OF_TENSORS = (
    *("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"),
    *("__contains__", "nonzero", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "is_nonzero"),
    *("argwhere", "bincount", "to"),
)
_OF_TORCH = (
    *("equal", "allclose", "nonzero", "masked_select", "unique", "unique_consecutive", "is_nonzero", "argwhere"),
    "bincount",
)
_OF_CUDA = ("synchronize",)
_OPERATIONS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "bincount", "_linalg_check_errors"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_coalesce"),
}
_INDEXING = ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")


class HostSyncs:
    """Records where in this package such calls come from, on any thread."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.num_of_others = 0
        self.is_counting = False
        self._nested = threading.local()

    @contextmanager
    def watched(self) -> Iterator["HostSyncs"]:
        """Watch calls inside the context; count only while `is_counting`."""
        owners: list[tuple[Any, str]] = [(Tensor, name) for name in _OF_TENSORS]
        owners += [(torch, name) for name in _OF_TORCH]
        owners += [(torch.cuda, name) for name in _OF_CUDA]
        before = [(owner, name, vars(owner).get(name), getattr(owner, name)) for owner, name in owners]
        for owner, name, _, function in before:
            setattr(owner, name, self._counted(name, function))
        run = threading.Thread.run
        threading.Thread.run = self._watching(run)  # type: ignore[method-assign]
        try:
            with _Operations(self):
                yield self
        finally:
            threading.Thread.run = run  # type: ignore[method-assign]
            for owner, name, own, _ in before:
                if own is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function that waits, and count it, but not what it calls in turn."""
        if not self.is_counting or getattr(self._nested, "is_inside", False):
            return function(*args, **kwargs)
        responsible = _responsible()
        if name == "to" and not _names_the_host(responsible, args[1:], kwargs):
            return function(*args, **kwargs)
        self._note(name, responsible)
        self._nested.is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._nested.is_inside = False

    def _counted(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            return self.call(name, function, args, kwargs)

        return counted

    def _watching(self, run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def watching(thread: threading.Thread) -> None:
            with _Operations(self):
                run(thread)

        return watching

    def _note(self, name: str, responsible: FrameType | None) -> None:
        if responsible is None or not responsible.f_code.co_filename.startswith(OURS):
            self.num_of_others += 1
            return
        code = responsible.f_code
        self.found[f"{Path(code.co_filename).relative_to(OURS).as_posix()}: {code.co_name}: {name}"] += 1


class _Operations(TorchDispatchMode):
    """Counts the operations of one thread that wait."""

    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(each.__torch_dispatch__ is not Tensor.__torch_dispatch__ and each is not FakeTensor for each in types):
            return NotImplemented  # the class of these tensors runs operations on what it holds: those are counted
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "aten" and _waits(name, args, kwargs):
            return self._syncs.call(name, func, args, kwargs)
        return func(*args, **kwargs)


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "repeat_interleave":
        return bool(args) and isinstance(args[-1], Tensor) and kwargs.get("output_size") is None
    if name not in _INDEXING:
        return name in _OPERATIONS
    indices = [index for index in args[1] if index is not None]
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    if not masks or len(args) == 2:
        return bool(masks)
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    is_filling = len(indices) == 1 and args[2].numel() == 1 and not accumulates  # runs as masked_fill_
    return not is_filling


def _responsible() -> FrameType | None:
    """Return the innermost frame of this package or `OTHERS`, whose call is being counted."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and (file.startswith(OURS) or any(part in file for part in OTHERS)):
            return frame
        frame = frame.f_back
    return None


def _names_the_host(responsible: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `Tensor.to` name the host, rather than a device that is the host in these tests."""
    for device in (*args, kwargs.get("device")):
        if isinstance(device, str) and torch.device(device).type == "cpu":
            return True
        if isinstance(device, torch.device) and device.type == "cpu" and responsible is not None:
            if any(isinstance(each, str) and each.split(":")[0] == "cpu" for each in responsible.f_code.co_consts):
                return True
            if any(value is device for value in list(responsible.f_globals.values())):
                return True
    return False
