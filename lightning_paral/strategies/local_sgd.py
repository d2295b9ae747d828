"""Local SGD: islands of ranks train apart under DDP, and exchange weights every period, over links that may be slow."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_paral.averaging.run import RunAverages
from lightning_paral.checkpoint.sharded_state import ShardedState
from lightning_paral.checkpoint.tree import PACKAGE_STATE_KEY
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.engines.local_sgd.options import LocalSGDOptions, check_run
from lightning_paral.engines.local_sgd.run import LocalSGDRun
from lightning_paral.engines.local_sgd.state import KEY, IslandState, entries, restore
from lightning_paral.model.checks import check_embeddings
from lightning_paral.option_types import takes
from lightning_paral.options import RankOptions
from lightning_paral.strategies.ddp import ParalDDPStrategy


class ParalLocalSGDStrategy(ParalDDPStrategy):
    """Let islands of ranks train apart, and exchange what they have learned every `period` optimizer steps.

    An island averages gradients in every step, as `paral_ddp` does. For machines that are joined by slow links:
    `Trainer(strategy=ParalLocalSGDStrategy(period=50, islands="node"))`. Numbers differ from those of one process.

    Options are keyword-only; `__init__` documents them.

    Raises:
        ConfigurationError: there is no period, or an option is wrong.
    """

    @takes(LocalSGDOptions)
    def __init__(self, options: LocalSGDOptions) -> None:
        super().__init__(**{field.name: getattr(options, field.name) for field in fields(RankOptions)})
        self._local = options
        self.strategy_name = options.strategy_name
        self._run: LocalSGDRun | None = None  # set by a fit, and kept for later saves

    @property
    def layout(self) -> Any:
        """How a plan counts the strategy with its options."""
        return self._local.layout

    # Process group

    @property
    def can_exchange(self) -> bool:
        """Whether all ranks can be reached: in a run, before a failure."""
        return self._watch.is_in_run and not self._watch.is_failing

    def _check_configured(self) -> None:
        super()._check_configured()
        check_run(self)
        self._local.arrange(0, self.num_nodes * self.num_processes, self.num_processes)

    def _prepare_process(self, trainer: Trainer) -> None:
        super()._prepare_process(trainer)
        save_frozen = self._checkpoint_options.save_frozen
        self._averages = RunAverages(trainer, save_frozen=save_frozen, obstacle=None)
        self._at_end.callback(self._averages.end)

    # Model wrapping

    def setup(self, trainer: Trainer) -> None:
        """Move the module to its device; in a fit, form the islands. *Collective* over the world.

        Raises:
            ConfigurationError: islands cannot train the module.
        """
        super().setup(trainer)
        if self._is_fit and self._run is not None:
            check_run(self, self._run.module)
            self._attach_averages(self._sharded_state.weight_shards)

    def configure_ddp(self) -> None:
        """Make all ranks equal, and wrap the module on islands of several ranks. *Collective* over the world."""
        assert self.lightning_module is not None
        check_embeddings(self.lightning_module, self.dims.data_size)
        islands = self._local.arrange(self.global_rank, self.world_size, self.num_processes)
        self._run = LocalSGDRun(self, self._local, islands, self._at_end)
        if islands.shard > 1:
            self._options = replace(self._options, process_group=islands.replica_group())
            super().configure_ddp()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Follow parameters that were frozen or unfrozen. *Collective* in the first step of an epoch, and after that.

        Raises:
            ConfigurationError: the ranks train different parameters.
        """
        assert self._run is not None
        self._run.before_batch(batch_idx)
        super().on_train_batch_start(batch, batch_idx)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run an optimizer step, and exchange weights if that is due. If so, *collective* over the world."""
        assert self._run is not None
        result = super().optimizer_step(optimizer, self._run.averaged(closure), model, **kwargs)
        self._run.after_step()
        return result

    def on_validation_start(self) -> None:
        """Make the module hold the mean of the islands. *Collective* over the world during a fit."""
        if self._run is not None:
            self._run.take_mean()
        super().on_validation_start()

    def on_validation_end(self) -> None:
        """Restore the weights of this island."""
        super().on_validation_end()
        if self._run is not None:
            self._run.give_back()

    def on_train_end(self) -> None:
        """Make the module hold the mean of the islands. *Collective* over the world."""
        if self._run is not None:
            self._run.take_mean()
            self._run.settle()
        super().on_train_end()

    # Sampler injection: `ParalStrategy`.

    # Checkpoint: the mean of the islands, and what the same islands need to resume exactly.

    @property
    def _sharded_state(self) -> ShardedState:
        if self._run is None or self._run.module is not self.lightning_module:
            return super()._sharded_state
        state = IslandState(self._run.module, self.optimizers, self.root_device, self._ended)
        state.run = self._run
        return state

    def _add_package_state(self, checkpoint: dict[str, Any], ranks: RankGroup) -> None:
        super()._add_package_state(checkpoint, ranks)
        run, is_whole = self._run, ranks.world_size == self.dims.num_ranks
        if run is not None and is_whole and "optimizer_states" in checkpoint:
            checkpoint[PACKAGE_STATE_KEY][KEY] = entries(run, ranks)
        elif run is not None and not is_whole and run.since:
            rank_zero_warn("After a failure, the checkpoint has the weights of the first island instead of the mean.")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, and the weights with which this island goes on.

        Raises:
            CheckpointError: the checkpoint has states for a different number of optimizers, or for different ones.
        """
        super().load_optimizer_state_dict(checkpoint)
        saved = self._own_state.get(KEY)
        if saved is not None and self._run is not None:
            restore(self._run, saved)
