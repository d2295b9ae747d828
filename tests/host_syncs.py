"""Count the calls that would make the host wait for a GPU."""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lightning_paral

OURS = str(Path(lightning_paral.__file__).parent)
OTHERS = ("/lightning/", "/deepspeed/", "/torch/optim/", "/torchmetrics/", "/tests/")
"""Code that is held responsible for its calls of torch. Other code in torch is called on behalf of these."""

_OF_TENSORS = (
    *("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__contains__"),
    *("nonzero", "masked_select", "unique", "equal", "allclose", "is_nonzero"),
)
_OF_TORCH = ("equal", "allclose", "nonzero", "masked_select", "unique", "is_nonzero", "argwhere")
_OF_CUDA = ("synchronize",)


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
        owners = [(Tensor, name) for name in _OF_TENSORS]
        owners += [(torch, name) for name in _OF_TORCH]
        owners += [(torch.cuda, name) for name in _OF_CUDA]
        before = [(owner, name, vars(owner).get(name), getattr(owner, name)) for owner, name in owners]
        for owner, name, _, function in before:
            setattr(owner, name, self._counted(name, function))
        move = Tensor.to
        Tensor.to = self._counted("to", move)  # type: ignore[method-assign]
        try:
            yield self
        finally:
            del Tensor.to
            for owner, name, own, _ in before:
                if own is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)

    def _counted(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if (
                self.is_counting
                and not getattr(self._nested, "is_inside", False)
                and _leaves_device(name, args, kwargs)
            ):
                self._note(name)
                self._nested.is_inside = True
                try:
                    return function(*args, **kwargs)
                finally:
                    self._nested.is_inside = False
            return function(*args, **kwargs)

        return counted

    def _note(self, name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(OURS):
                self.found[f"{Path(file).relative_to(OURS).as_posix()}: {frame.f_code.co_name}: {name}"] += 1
                return
            if any(part in file for part in OTHERS):
                break
            frame = frame.f_back
        self.num_of_others += 1


def _leaves_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call explicitly moves a tensor to the host: in these tests devices are the host, too."""
    return name != "to" or "cpu" in (*(arg for arg in args[1:] if isinstance(arg, str)), kwargs.get("device"))
