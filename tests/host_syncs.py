"""Count calls that would make the host wait for a GPU, in tests where the CPU is the only device.

Patches of torch's methods see calls on every thread. A dispatch mode sees the operations of the calling thread and of
its backward passes, and the values that C++ code reads, such as those that `tensor[mask]` needs. Moves between devices
are only found if `to` names the host as `"cpu"`. `tests/gpu/syncs.py` counts all waits on a GPU.
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
_METHODS = (
    *("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"),
    *("__contains__", "nonzero", "masked_select", "unique", "equal", "allclose", "to"),
)
_OPERATIONS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "bincount", "_unique2", "unique_dim"),
}


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
        before = {name: (vars(Tensor).get(name), getattr(Tensor, name)) for name in _METHODS}
        for name, (_, function) in before.items():
            setattr(Tensor, name, self._counted(name, function))
        try:
            with _Operations(self):
                yield self
        finally:
            for name, (own, _) in before.items():
                if own is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, own)

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function that waits, and count this call, but not the calls that it makes itself."""
        if not self.is_counting or getattr(self._nested, "is_inside", False):
            return function(*args, **kwargs)
        names_the_host = any(isinstance(device, str) and device == "cpu" for device in (*args, kwargs.get("device")))
        if name == "to" and not names_the_host:
            return function(*args, **kwargs)
        self._note(name)
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

    def _note(self, name: str) -> None:
        responsible = _responsible()
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
        namespace, _, name = func._schema.name.partition("::")
        reads_a_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if namespace == "aten" and (name in _OPERATIONS or reads_a_mask):
            return self._syncs.call(name, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _responsible() -> FrameType | None:
    """Return the innermost frame in this package or in `OTHERS`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and (file.startswith(OURS) or any(part in file for part in OTHERS)):
            return frame
        frame = frame.f_back
    return None
