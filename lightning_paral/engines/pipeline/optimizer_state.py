"""Optimizer state on a stage: reading that of parameters of other stages is an error that says so."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.engines.pipeline.elsewhere import is_elsewhere, is_of_user
from lightning_paral.errors import ConfigurationError


class StageOptimizerState(defaultdict[Any, Any]):
    """The attribute `state` of an optimizer whose parameters are partly on other stages.

    Only libraries and optimizers may iterate over it: what other code computes from it would be of one stage.
    """

    def __missing__(self, parameter: Any) -> Any:
        """Return a new state, or what stands for the state of a parameter of another stage."""
        if isinstance(parameter, Tensor) and is_elsewhere(parameter):
            return _StateElsewhere(str(vars(parameter)["description"]))
        return super().__missing__(parameter)

    def __iter__(self) -> Iterator[Any]:
        _check_reader()
        return super().__iter__()

    def __len__(self) -> int:
        _check_reader()
        return super().__len__()

    def keys(self) -> Any:
        """Return the parameters with a state on this stage."""
        _check_reader()
        return super().keys()

    def values(self) -> Any:
        """Return the states on this stage."""
        _check_reader()
        return super().values()

    def items(self) -> Any:
        """Return the parameters with a state on this stage, and their states."""
        _check_reader()
        return super().items()


class _StateElsewhere(MutableMapping[str, Any]):
    """The state of a parameter of another stage, which cannot be used on this one."""

    def __init__(self, description: str) -> None:
        self._description = description

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            f"The optimizer's state of {self._description} was used, but it is on that stage only. On all ranks, "
            "trainer.strategy.full_optimizer_state(parameter, key) returns whole states. To change states in hooks, "
            "train with paral_fsdp."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _refuse


def watch_state(optimizer: Optimizer) -> Callable[[], None]:
    """Make `optimizer.state` a `StageOptimizerState`, and keep it one when states are loaded.

    Returns:
        Callable[[], None]: a function that undoes this.
    """

    def replace(optimizer: Optimizer) -> None:
        optimizer.state = StageOptimizerState(dict, optimizer.state)

    replace(optimizer)
    handle = optimizer.register_load_state_dict_post_hook(replace)

    def undo() -> None:
        handle.remove()
        optimizer.state = defaultdict(dict, optimizer.state)

    return undo


def _check_reader() -> None:
    if is_of_user(sys._getframe(2)):
        raise ConfigurationError(
            "Code has iterated over optimizer.state, which has the states of one stage of the pipeline only. Iterate "
            "over parameters instead: on all ranks, trainer.strategy.full_optimizer_state(parameter, key) returns "
            "whole states. To change states in hooks, train with paral_fsdp."
        )
