"""Modes that show which functions and operations run."""

from typing import Any, Protocol

from torch.overrides import TorchFunctionMode

from lightning_paral.compat.torch.tensors import TorchDispatchMode


class Observer(Protocol):
    """Sees functions and operations."""

    @property
    def is_quiet(self) -> bool:
        """Whether what runs is not observed."""
        ...

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function."""
        ...

    def before_operation(self, args: Any, kwargs: Any) -> None:
        """Observe the arguments of an operation that no function of Python has called."""
        ...


class Functions(TorchFunctionMode):
    """Shows the functions that Python calls."""

    def __init__(self, trace: Observer) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._trace.is_quiet:
            return func(*args, **kwargs)
        return self._trace.call(func, args, kwargs)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows the operations that code in other languages calls."""

    def __init__(self, trace: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._trace.is_quiet:
            self._trace.before_operation(args, kwargs)
        return func(*args, **kwargs)
