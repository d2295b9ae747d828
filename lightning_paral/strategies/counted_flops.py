"""Count the operations by which `balance="time"` divides the units of a pipeline."""

from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.distributed.exchange import explain
from lightning_paral.engines.pipeline.division import check_number_of_units
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.model.units import Units
from lightning_paral.planning.follow import count_unit_flops


class CountedFlops:
    """Counts the operations of the units of each module once.

    With some builds of torch, a process that has trained cannot count again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int], ...], list[int]] = {}
        """By the names and numbers of parameters of the units."""

    def of_units(self, strategy: Any, units: Units, trainer: Trainer) -> list[int]:
        """Return the operations of each unit in a training step, which rank 0 counts. *Collective* over the world.

        Args:
            strategy: the strategy, whose ranks have joined.
            units: the units of the chain.
            trainer: the Trainer, which is about to fit.

        Raises:
            ConfigurationError: they cannot be counted, or there are fewer units than stages.
        """
        check_number_of_units(units, strategy.dims.pipeline)
        sizes = tuple((unit.name, unit.num_params) for unit in units.inner)
        outcome: list[int] | str | None = self._known.get(sizes)
        module = strategy.lightning_module
        if strategy.global_rank == 0 and outcome is None:
            names = [unit.name for unit in units.inner]
            try:
                outcome = count_unit_flops(trainer, module, names)
            except (ParalError, OSError) as error:
                outcome = explain(error)
        outcome = strategy.broadcast(outcome)
        if isinstance(outcome, str):
            raise ConfigurationError(
                f"balance='time' cannot count the operations of {type(module).__name__}: {outcome}. Set "
                "balance='params', or give the number of units of each stage."
            )
        assert outcome is not None
        self._known[sizes] = outcome
        return outcome
