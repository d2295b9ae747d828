"""One strategy under test, and the facts about it that the suites need."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_paral import STRATEGIES, ParalZeROStrategy

Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StrategyCase:
    """A strategy under test."""

    label: str
    """The registered name of the strategy if `constructor` is `None`; otherwise any unique label."""
    constructor: type[Strategy] | None = None
    """The class, for a combination of options that is not registered under a name."""
    options: Options | Callable[[], Options] = field(default_factory=dict)
    """The keyword arguments of `constructor`, or a function that returns them."""
    differs_in: Literal["engine", "parameters", "optimizer", "option"] = "engine"
    """How the case differs from the others: in computing gradients, in placing parameters, in placing the state of the
    optimizer, or in an option only. Suites with many tests run for some of these values only."""
    shards_parameters: bool = False
    """Whether each rank holds only a shard of the parameters."""
    tolerance: float = 1e-5
    """The largest difference from training in one process: absolute for weights, relative for losses."""
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    """The numbers of ranks with which suites run the case. Tests that need a different number of ranks leave it out.
    Empty if the strategy has all its devices in one process."""
    devices_per_process: tuple[int, ...] = ()
    """The numbers of devices with which suites run the case if it has all of them in one process, and no ranks."""
    resumes_others: bool = True
    """Whether the case resumes from checkpoints of all cases with this flag, and they from its own."""
    themes_of_user_code: tuple[str, ...] | Literal["all", "named"] = ()
    """The themes of `tests.contract.user_code` whose rows all run under this case; `"named"`: only the rows that name
    it. If empty, the case has no column in the table of user code, nor in that of Lightning's features. Both tables run
    on two ranks. A strategy of another package is not on their pages, so each of its cells must be allowed."""

    def strategy(self, **more: Any) -> str | Strategy:
        """Return a value for `Trainer(strategy=...)`: a name or a new strategy, with `more` added to its options."""
        if self.constructor is None and not more:
            return self.label
        options = self.options() if callable(self.options) else self.options
        return self.type(**{**self._options_of_name, **options, **more})

    @property
    def type(self) -> Any:
        """The class of the strategy."""
        ours = next((entry.strategy for entry in STRATEGIES if entry.name == self.label), None)
        return self.constructor or ours or StrategyRegistry[self.label]["strategy"]

    @property
    def _options_of_name(self) -> Options:
        """The options that the registered name includes."""
        return {} if self.constructor else StrategyRegistry[self.label]["init_params"]

    @property
    def has_ranks(self) -> bool:
        """Whether the strategy has a process per device."""
        return bool(self.world_sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of ranks to run with, or of devices if they are all in one process."""
        return self.world_sizes or self.devices_per_process

    def sizes_among(self, *sizes: int) -> tuple[int, ...]:
        """Return those of `sizes` to run the case with, in the given order."""
        return tuple(size for size in sizes if size in self.sizes)

    @property
    def needs_deepspeed(self) -> bool:
        """Whether the case needs DeepSpeed."""
        return issubclass(self.type, ParalZeROStrategy)

    @property
    def needs_operators(self) -> bool:
        """Whether the case needs DeepSpeed's compiled operators, as offload to NVMe does."""
        options = {**self._options_of_name, **(self.options() if callable(self.options) else self.options)}
        offload = options.get("offload_optimizer")
        return getattr(offload, "device", offload) == "nvme"
