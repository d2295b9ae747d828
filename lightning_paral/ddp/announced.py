"""Backward passes that nobody announced: DDP averages the gradients of those alone that it was prepared for."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_paral.errors import ConfigurationError


class AnnouncedBackward:
    """Notices gradients that came by `loss.backward()` under manual optimization, which no rank averages."""

    def __init__(self) -> None:
        self._handles: dict[Parameter, RemovableHandle] = {}
        self._is_running = False
        self._has_unannounced = False

    def watch(self, parameters: Iterable[Parameter]) -> None:
        """Notice gradients of `parameters`, which require them now."""
        for parameter in parameters:
            if parameter not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
                self._handles[parameter] = handle

    def _note(self, parameter: Tensor) -> None:
        self._has_unannounced |= not self._is_running

    @contextmanager
    def running(self) -> Iterator[None]:
        """Say that a backward pass inside the block was announced."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def check(self) -> None:
        """Check, before an optimizer uses gradients, that all of them were averaged.

        Raises:
            ConfigurationError: some came by `loss.backward()`.
        """
        if self._has_unannounced:
            raise ConfigurationError(
                "Gradients came by loss.backward() under manual optimization, of which DDP knows nothing: the ranks "
                "did not average them. Call self.manual_backward(loss) instead, or torch.autograd.grad where gradients "
                "are not for the optimizer."
            )

    def end(self) -> None:
        """Watch no more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
