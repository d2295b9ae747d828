"""Gradients and optimizer states that code of the user's looks for where they are not: an error, not silence."""

from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

from lightning_paral.errors import ParalError


class HiddenGradientError(ParalError, RuntimeError):
    """Code of the user's read or set `parameter.grad`, which is empty under ZeRO."""


def refuse_gradient(name: str) -> NoReturn:
    """Raise the error for a read of `.grad` of the parameter `name`."""
    raise HiddenGradientError(
        f"The gradient of {name!r} was read by parameter.grad, but under ZeRO each rank holds its part of the "
        "gradients only, and not there. Read whole gradients with `self.trainer.strategy.full_gradient(parameter)`, "
        "their norm with `self.trainer.strategy.gradient_norm()`, and clip with `self.clip_gradients(optimizer, ...)`."
    )


def refuse_new_gradient(name: str) -> NoReturn:
    """Raise the error for setting `.grad` of the parameter `name`."""
    raise HiddenGradientError(
        f"parameter.grad of {name!r} was set in a hook or step, but under ZeRO each rank holds its part of the "
        "gradients only, and not there: the optimizer would not see it. Change the loss instead, or train with "
        "paral_ddp or paral_fsdp."
    )


class HiddenStateError(ParalError, RuntimeError):
    """Code of the user's used `optimizer.state`, which is empty under ZeRO."""


class HiddenState(MutableMapping[Any, Any]):
    """In the place of `optimizer.state`: of each state, ranks hold a part only."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise HiddenStateError(
            "The state of the optimizer was used, but under ZeRO each rank holds its part of it only, and not there. "
            'Read it with `self.trainer.strategy.full_optimizer_state(parameter, "exp_avg")`; checkpoints hold all of '
            "it. To reset or change it, train with paral_ddp or paral_fsdp."
        )

    def __getitem__(self, key: Any) -> Any:
        self._refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()

    def __delitem__(self, key: Any) -> None:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()
