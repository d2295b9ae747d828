"""Share rank 0's buffers, such as the running means of BatchNorm, with all ranks during a fit, as DDP does."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_paral.averaging.buffers import broadcast_when_swapped
from lightning_paral.model.buffers import RankZeroBuffers
from lightning_paral.strategies.description import StrategyDescription


class SharedBuffers(StrategyDescription):
    """Mixin, placed before the Lightning base: every rank trains and validates with rank 0's buffers.

    They are broadcast before the training step that begins an accumulation window, at the start of validation, and at
    the end of training. Validation therefore evaluates the buffers that checkpoints contain.
    """

    _buffers: RankZeroBuffers | None = None
    """Set during a fit."""
    _undo_broadcast_of_averages: Callable[[], None] | None = None

    def make_buffers(self) -> RankZeroBuffers:
        """Return the object that broadcasts the buffers during a fit.

        Override this if the engine broadcasts buffers at some of these times itself.
        """
        assert self.lightning_module is not None
        return RankZeroBuffers(self.lightning_module, self.shares_buffers, self.dims)

    def _fit_buffers(self) -> RankZeroBuffers | None:
        """Return the object that broadcasts the buffers, created by the first call in a fit; `None` in evaluation."""
        # Created on demand, so that a subclass that overrides `setup` cannot forget to create it.
        if self._buffers is None and self._is_fit:
            self._buffers = self.make_buffers()
            if self._default_form == "full":  # otherwise our averaging callbacks share the averages
                self._undo_broadcast_of_averages = broadcast_when_swapped(self._buffers)
        return self._buffers

    def _end_buffers(self) -> None:
        self._buffers = None
        if self._undo_broadcast_of_averages is not None:
            self._undo_broadcast_of_averages()
            self._undo_broadcast_of_averages = None

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients in backward passes inside this context."""
        with super().block_backward_sync(), self._accumulating_buffers():
            yield

    def _accumulating_buffers(self) -> AbstractContextManager[None]:
        """Return a context in which training steps do not end an accumulation window."""
        buffers = self._fit_buffers()
        return nullcontext() if buffers is None else buffers.accumulating()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step with rank 0's buffers. *Collective* over the world."""
        buffers = self._fit_buffers()
        if buffers is not None:
            buffers.before_training_step()
        return super().training_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Give all ranks rank 0's buffers. *Collective* over the world during a fit."""
        super().on_validation_start()
        buffers = self._fit_buffers()
        if buffers is not None:
            buffers.share()

    def on_train_end(self) -> None:
        """Give all ranks rank 0's buffers. *Collective* over the world."""
        super().on_train_end()
        buffers = self._fit_buffers()
        if buffers is not None:
            buffers.share()
