"""Count calls that would make the host wait for a GPU, in tests where the CPU is the only device.

Two means find such calls. Patches of torch's functions see calls on every thread. A dispatch mode sees operations on
the calling thread, in its backward passes, and on threads started inside the context. It also sees the values that C++
code reads: those that `tensor[mask]`, `torch.where(condition)` and tensors as indices need.

Some waits are not found, because there is only one device:

- A move or `copy_` between devices, unless `Tensor.to` names the host: as the string `"cpu"`, or as a `torch.device` if
  the calling function has a constant `"cpu"`, or its module has that `torch.device` as a global.
  `square.to(other.device)` and `on_host.copy_(tensor)` wait if the devices differ, as they may under offloading.
- A copy from the host: `torch.tensor(number, device=device)`, or an index that is a list or a tensor on the host.
- `tensor[mask] = value` with a `value` of one element. A number needs no wait, but a tensor on the device does.
- Waits for streams, events and collectives, and functions that copy memory themselves, such as `torch.save` and
  collectives of objects.

`tests/gpu/syncs.py` counts all waits on a GPU.
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
"""Code outside this package whose calls of torch are counted as its own. Other code is not a caller."""

_TENSOR_METHODS = (
    *("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"),
    *("__contains__", "nonzero", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "is_nonzero"),
    *("argwhere", "bincount", "to"),
)
_TORCH_FUNCTIONS = (
    *("equal", "allclose", "nonzero", "masked_select", "unique", "unique_consecutive", "is_nonzero", "argwhere"),
    "bincount",
)
_CUDA_FUNCTIONS = ("synchronize",)
_OPERATIONS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "bincount", "_linalg_check_errors"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_coalesce"),
}
_INDEXING = ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")


class HostSyncs:
    """Records from which lines of this package the waiting calls come, on any thread."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.num_elsewhere = 0
        self.is_counting = False
        self._nested = threading.local()

    @contextmanager
    def watched(self) -> Iterator["HostSyncs"]:
        """Watch calls inside the context. They are counted only while `is_counting` is true."""
        owners: list[tuple[Any, str]] = [(Tensor, name) for name in _TENSOR_METHODS]
        owners += [(torch, name) for name in _TORCH_FUNCTIONS]
        owners += [(torch.cuda, name) for name in _CUDA_FUNCTIONS]
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
        """Call a function that waits, and count this call, but not the calls that it makes itself."""
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
            self.num_elsewhere += 1
            return
        code = responsible.f_code
        self.found[f"{Path(code.co_filename).relative_to(OURS).as_posix()}: {code.co_name}: {name}"] += 1


class _Operations(TorchDispatchMode):
    """Counts the waiting operations of one thread."""

    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(each.__torch_dispatch__ is not Tensor.__torch_dispatch__ and each is not FakeTensor for each in types):
            return NotImplemented  # a subclass then runs operations on its inner tensors, and those are counted
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
    """Return the innermost frame in this package or in `OTHERS`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and (file.startswith(OURS) or any(part in file for part in OTHERS)):
            return frame
        frame = frame.f_back
    return None


def _names_the_host(responsible: FrameType | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of `Tensor.to` name the host itself, not a device that is the CPU in these tests."""
    for device in (*args, kwargs.get("device")):
        if isinstance(device, str) and torch.device(device).type == "cpu":
            return True
        if isinstance(device, torch.device) and device.type == "cpu" and responsible is not None:
            if any(isinstance(each, str) and each.split(":")[0] == "cpu" for each in responsible.f_code.co_consts):
                return True
            if any(value is device for value in list(responsible.f_globals.values())):
                return True
    return False
