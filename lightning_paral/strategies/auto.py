"""Choose the strategy when a fit begins, from the memory that each would need."""

import os
from dataclasses import dataclass, fields

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_paral.callbacks.monitor import ParalMonitor
from lightning_paral.compat.lightning.strategies import replace_strategy
from lightning_paral.distributed.exchange import all_ranks
from lightning_paral.engines.zero.process import check_installed
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.model.host_memory_check import available_bytes
from lightning_paral.option_types import takes
from lightning_paral.options import ActivationCheckpointing, RankOptions
from lightning_paral.planning.layout import LAYOUTS, Layout
from lightning_paral.planning.plan import plan_fit
from lightning_paral.quantities import parse_bytes
from lightning_paral.strategies.base import ParalStrategy

_DDP = next(layout for layout in LAYOUTS if layout.strategy == "paral_ddp")


@dataclass(frozen=True, kw_only=True)
class AutoOptions(RankOptions):
    """The options of `ParalAutoStrategy`.

    Args:
        device_memory: the memory that a rank may use, in bytes or as text such as `"16GiB"`. `None`: on CUDA, the
            memory of the device; on CPU, the free memory of the node, divided by its ranks.
    """

    device_memory: int | str | None = None


class ParalAutoStrategy(ParalStrategy, DDPStrategy):
    """Become the strategy that `paral plan` recommends, when a fit begins.

    Select it by name, `Trainer(strategy="paral_auto")`, or pass an object to set options,
    `Trainer(strategy=ParalAutoStrategy(device_memory="16GiB"))`. Rank 0 follows a step of the module on tensors without
    memory, estimates what each strategy needs, and chooses the cheapest in traffic that fits. All ranks take its
    choice, and a line says it. From then on, `trainer.strategy` is the chosen strategy, which later runs of the Trainer
    use as well. An evaluation before the fit runs on full replicas, as under `paral_ddp`.

    If the step cannot be followed without values of tensors, the choice is made from parameters, gradients and
    optimizer states alone. If the module cannot be planned at all, the choice is `paral_ddp`. The line says so in both
    cases. If nothing fits, it is an error.

    Options are keyword-only; `__init__` documents them. Those that all strategies share are passed on.

    Raises:
        ConfigurationError: `device_memory` is not a size, or another option is out of range.
    """

    strategy_name = "paral_auto"

    @takes(AutoOptions)
    def __init__(self, options: AutoOptions) -> None:
        memory = options.device_memory
        self.device_memory = None if memory is None else parse_bytes(memory, "ParalAutoStrategy(device_memory=...)")
        shared = {field.name: getattr(options, field.name) for field in fields(RankOptions)}
        self._rank_options = {name: value for name, value in shared.items() if name not in options.of_trainer}
        super().__init__(options)
        self._chosen: ParalStrategy | None = None

    # Process group

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; in a fit, become the chosen strategy after the hooks `setup`. *Collective*.

        Raises:
            ConfigurationError: no strategy fits into the memory.
        """
        super().barrier(name)
        if name == "post_setup" and self._is_fit and self._chosen is None:
            self._become_chosen()

    def _print_start_line(self, trainer: Trainer) -> None:
        """Print nothing: the chosen strategy prints its line."""

    # Model wrapping

    def _become_chosen(self) -> None:
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        strategy = self._make(self._agree_on_layout(trainer))
        self.teardown()
        replace_strategy(trainer, strategy)
        self._chosen, self._watch = strategy, strategy._watch  # the launcher, which knows only this one, asks it
        strategy.connect(module)
        strategy.setup_environment()

    def _agree_on_layout(self, trainer: Trainer) -> Layout:
        """Return the layout that rank 0 has chosen. *Collective* over the world.

        Raises:
            ConfigurationError: nothing fits.
        """
        memory = min(all_ranks().gather(self._memory()))
        outcome: Layout | str = self.broadcast(self._choose(trainer, memory) if self.global_rank == 0 else None)
        if isinstance(outcome, str):
            raise ConfigurationError(f"paral_auto: {outcome}")
        return outcome

    def _memory(self) -> int:
        """Return how many bytes a rank may use."""
        if self.device_memory is not None:
            return self.device_memory
        if self.root_device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.root_device).total_memory)
        available = available_bytes()
        return 2**62 if available is None else available // max(1, self.num_processes)

    def _choose(self, trainer: Trainer, memory: int) -> Layout | str:
        """Return the layout to use, or why nothing fits. Say the choice in a line."""
        module = self.lightning_module
        assert module is not None
        try:
            made = plan_fit(trainer, module, [layout for layout in LAYOUTS if self._is_ready(layout)], memory)
        except (ParalError, OSError) as error:
            rank_zero_warn(f"paral_auto uses paral_ddp, because the fit cannot be planned: {error}")
            return _DDP
        text = " ".join([made.advice, *made.notes])
        if made.chosen is None:
            return text
        rank_zero_info(f"paral_auto: {text}")
        for callback in vars(trainer)["callbacks"]:
            if isinstance(callback, ParalMonitor):
                callback.expect(made.chosen.peak_bytes)
        return made.chosen.layout

    def _is_ready(self, layout: Layout) -> bool:
        """Return whether what the layout needs is installed and configured."""
        if layout.engine == "zero":
            try:
                check_installed()
            except ConfigurationError:
                return False
        return "nvme" not in (layout.optimizer_place, layout.parameter_place) or "PARAL_NVME_PATH" in os.environ

    def _make(self, layout: Layout) -> ParalStrategy:
        """Return the strategy of a layout, with the options that were given to this one."""
        options = {**self._rank_options, "split": self.sampling.split}
        if layout.recomputes:
            options["activation_checkpointing"] = ActivationCheckpointing()
        registered = StrategyRegistry[layout.strategy]
        strategy: ParalStrategy = registered["strategy"](**registered["init_params"], **options)
        return strategy

    # Sampler injection and checkpoint: those of the chosen strategy.
