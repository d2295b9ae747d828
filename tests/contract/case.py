"""One strategy under test, with what suites need to know of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_paral import ParalZeROStrategy

Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StrategyCase:
    """A strategy under test."""

    label: str
    """The name that `Trainer(strategy=...)` takes, if it has one, and `constructor` is `None`."""
    constructor: type[Strategy] | None = None
    """The class, for options that have no name of their own."""
    options: Options | Callable[[], Options] = field(default_factory=dict)
    """What `constructor` is called with."""
    differs_in: Literal["engine", "parameters", "optimizer", "option"] = "engine"
    """What tells it from the other cases: how it computes gradients, how it holds parameters, how it holds the state of
    the optimizer, or an option. Suites with many rows run in some of these kinds only."""
    shards_parameters: bool = False
    """Whether no rank holds all parameters."""
    tolerance: float = 1e-5
    """Largest difference to one process, absolute for weights and relative for losses."""
    world_sizes: tuple[int, ...] = (1, 2, 4)
    devices_per_process: tuple[int, ...] = ()
    """For a strategy that has all its devices in one process, and no ranks: the numbers of devices to try."""
    resumes_others: bool = True
    """Whether it resumes from the checkpoints of all other such cases, and they from its own."""
    themes_of_user_code: tuple[str, ...] | Literal["all", "named"] = ()
    """The themes of `tests.contract.user_code` whose rows all run in it; `"named"`: only rows that name it. Without
    any, it has no column in the documented tables, that of Lightning's features included."""

    def strategy(self, **more: Any) -> str | Strategy:
        """Return what is passed as `Trainer(strategy=...)`: made anew, with the options in `more` besides its own."""
        if self.constructor is None and not more:
            return self.label
        options = self.options() if callable(self.options) else self.options
        return self.type(**{**self._of_name, **options, **more})

    @property
    def type(self) -> Any:
        """The class of the strategy."""
        return self.constructor or StrategyRegistry[self.label]["strategy"]

    @property
    def _of_name(self) -> Options:
        """What the name stands for, besides the class."""
        return {} if self.constructor else StrategyRegistry[self.label]["init_params"]

    @property
    def has_ranks(self) -> bool:
        """Whether it has a process per device."""
        return bool(self.world_sizes)

    @property
    def needs_deepspeed(self) -> bool:
        """Whether DeepSpeed has to be installed."""
        return issubclass(self.type, ParalZeROStrategy)

    @property
    def needs_operators(self) -> bool:
        """Whether DeepSpeed's compiled operators are needed, such as its Adam on the host."""
        options = self.options() if callable(self.options) else self.options
        return self.needs_deepspeed and "offload_optimizer" in {**self._of_name, **options}
