"""Optimizer state on a stage: reading that of a parameter of another stage is an error that says so."""

from collections import defaultdict
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.engines.pipeline.elsewhere import is_elsewhere
from lightning_paral.errors import ConfigurationError


class StageOptimizerState(defaultdict[Any, Any]):
    """The attribute `state` of an optimizer whose parameters are partly on other stages."""

    def __missing__(self, parameter: Any) -> Any:
        """Return a new state, or what stands for the state of a parameter of another stage."""
        if isinstance(parameter, Tensor) and is_elsewhere(parameter):
            return _StateElsewhere(str(vars(parameter)["description"]))
        return super().__missing__(parameter)


class _StateElsewhere(dict[str, Any]):
    """The state of a parameter of another stage: it is empty on this one."""

    def __init__(self, description: str) -> None:
        super().__init__()
        self._description = description

    def __missing__(self, key: str) -> NoReturn:
        raise ConfigurationError(
            f"The optimizer's state {key!r} of {self._description} was read, but it is on that stage only. On all "
            f"ranks, trainer.strategy.full_optimizer_state(parameter, {key!r}) returns whole states. To change states "
            "in hooks, train with paral_fsdp."
        )


def watch_state(optimizer: Optimizer) -> None:
    """Make `optimizer.state` a `StageOptimizerState`, also after states are loaded."""

    def replace(optimizer: Optimizer) -> None:
        optimizer.state = StageOptimizerState(dict, optimizer.state)

    replace(optimizer)
    optimizer.register_load_state_dict_post_hook(replace)
