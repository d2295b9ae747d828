"""Check that the ranks of a run do not differ: settings, parameters, optimizers, steps, and values of replicas."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.distributed.differences.epoch_agreement import EpochAgreement
from lightning_paral.distributed.differences.same_on_ranks import check_same
from lightning_paral.distributed.failures.failure_watch import FailureWatch
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ConfigurationError
from lightning_paral.strategies.description import StrategyDescription
from lightning_paral.strategies.facts import facts_of_optimizers, facts_of_run, facts_of_tensors
from lightning_paral.strategies.replica_check import ReplicaCheck
from lightning_paral.strategies.run_data import RunData

_SAME_SETTINGS = "They decide which collectives a rank calls. Give all ranks the same settings."
_SAME_MODULE = (
    "All ranks train the same module. Create it in the same way on all ranks: not from data, files or environment "
    "variables that differ between them."
)
_SAME_OPTIMIZERS = (
    "Ranks whose optimizers differ would end up with different weights. Return the same optimizers and learning rate "
    "schedulers from configure_optimizers on all ranks."
)
_SAME_HYPER_PARAMETERS = (
    "Since training began, they have been changed in different ways, and so the weights differ as well. If a scheduler "
    "such as ReduceLROnPlateau monitors a value, log it with sync_dist=True, so that it is equal on all ranks."
)


class RankAgreement(StrategyDescription):
    """Mixin, placed before the Lightning base: a difference between ranks is an error that names it."""

    divergence_check_every: int | None = None
    """The option `divergence_check_every`: after how many optimizer steps replicas are compared; `None`: never."""
    _watcher: RankWatcher | None = None
    _failures: FailureWatch | None = None
    _data: RunData
    _steps: EpochAgreement | None = None
    """During a fit with several ranks."""
    _replica_check: ReplicaCheck | None = None
    """During a fit with several ranks and the option `divergence_check_every`."""
    _undo_agreement: ExitStack | None = None
    _num_epoch_ends = 0

    def _check_same_settings(self, trainer: Trainer) -> None:
        """Check that the ranks have the same settings of the Trainer. *Collective* over the world.

        Raises:
            ConfigurationError: they differ.
        """
        if self.dims.num_ranks > 1:
            check_same(facts_of_run(trainer, self), _SAME_SETTINGS)

    def _check_same_module(self) -> None:
        """Check that the ranks have modules of the same structure. *Collective* over the world.

        Call this before the first collective that assumes it.

        Raises:
            ConfigurationError: they differ.
        """
        if len(self.dims.stage_ranks) == 1:
            return
        assert self.lightning_module is not None
        facts = facts_of_tensors(
            self.lightning_module,
            trains=self._is_fit,
            shares_buffers=self._is_fit and self._broadcasts_buffers,
            shape_of=self._full_shape,
        )
        check_same(facts, _SAME_MODULE, self.dims.stage_group())

    def _check_same_optimizers(self) -> None:
        """Check that the ranks have the same optimizers and schedulers. *Collective* over the world.

        Raises:
            ConfigurationError: they differ.
        """
        if len(self.dims.stage_ranks) > 1:
            facts = facts_of_optimizers(self.optimizers, self.lr_scheduler_configs, self.lightning_module)
            check_same(facts, _SAME_OPTIMIZERS, self.dims.stage_group())

    def _check_same_hyper_parameters(self) -> None:
        """Check that the learning rates and other hyper-parameters are still equal. *Collective* over the world.

        Raises:
            ConfigurationError: they differ.
        """
        if len(self.dims.stage_ranks) > 1:
            facts = facts_of_optimizers(self.optimizers, self.lr_scheduler_configs, None)
            check_same(facts, _SAME_HYPER_PARAMETERS, self.dims.stage_group())

    @property
    def _broadcasts_buffers(self) -> bool:
        """Whether buffers are broadcast during a fit, so that all ranks must have the same ones."""
        return self.shares_buffers

    @staticmethod
    def _full_shape(tensor: Any) -> Any:
        """Return the full shape of a parameter or buffer, which may be sharded."""
        return tensor.shape

    @staticmethod
    def _is_sharded(parameter: Any) -> bool:
        """Return whether ranks hold different parts of a parameter."""
        return False

    def _replicas(self) -> dict[str, tuple[Tensor, int]]:
        """Return by name the tensors of which other ranks hold replicas, each with a number: 0 if it is in full.

        Tensors of ranks with the same name and number must be equal after each optimizer step.
        """
        assert self.lightning_module is not None
        named = self.lightning_module.named_parameters()
        return {name: (parameter, 0) for name, parameter in named if not self._is_sharded(parameter)}

    def _begin_agreement(self, trainer: Trainer) -> None:
        """Compare the ranks until `_end_agreement`. *Collective* over the world."""
        self._undo_agreement = ExitStack()
        if not self._is_fit or self._watcher is None:
            return
        self._steps = EpochAgreement(self._watcher, self.timeout)  # type: ignore[attr-defined]
        self._watcher.add(self._steps)
        self._num_epoch_ends = 0
        end_epoch = trainer.fit_loop.on_advance_end

        def agree_and_end_epoch() -> None:
            self._agree_on_end_of_epoch(trainer)
            end_epoch()

        shadow_method(trainer.fit_loop, "on_advance_end", agree_and_end_epoch, self._undo_agreement)
        if self.divergence_check_every is not None:
            self._replica_check = ReplicaCheck(self.divergence_check_every, self._replicas, self.dims)

    def _end_agreement(self) -> None:
        if self._watcher is not None and self._steps is not None:
            self._watcher.remove(self._steps)
        if self._undo_agreement is not None:
            self._undo_agreement.close()
        self._steps = self._replica_check = self._undo_agreement = None

    def _agree_on_end_of_epoch(self, trainer: Trainer) -> None:
        if self._steps is not None:
            self._num_epoch_ends += 1
            self._steps.progress.epoch = trainer.current_epoch
            self._steps.end_epoch(self._num_epoch_ends)
            self._check_same_hyper_parameters()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers and schedulers. *Collective* over the world.

        Raises:
            ConfigurationError: the ranks have different optimizers or schedulers.
        """
        super().setup_optimizers(trainer)
        self._check_same_optimizers()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step.

        Raises:
            ConfigurationError: under automatic optimization, the step returned `None`.
        """
        if self._steps is not None:
            self._steps.progress.batches += 1
        output = super().training_step(*args, **kwargs)
        if output is None and self.dims.num_ranks > 1:
            module = self.lightning_module
            assert module is not None
            if module.automatic_optimization:
                loop = module.trainer.fit_loop.epoch_loop
                raise ConfigurationError(
                    f"training_step returned None on rank {self.dims.rank}, for batch {loop.batch_idx} of epoch "
                    f"{module.trainer.current_epoch}. With several ranks no rank can skip a step, because gradients "
                    "are averaged over all of them. Return a loss that is zero instead, such as 0 * loss."
                )
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass."""
        if self._steps is not None and getattr(self.model, "require_backward_grad_sync", True):
            self._steps.progress.backwards += 1
        return super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run an optimizer step; every `divergence_check_every` steps, compare replicas first. *Collective* if so.

        Raises:
            ConfigurationError: replicas of a parameter differ.
        """
        if self._replica_check is not None and self._steps is not None:
            # Before the next step: under ZeRO, the step gives all ranks the values of the owners of the shards.
            self._replica_check.after_step(self._steps.progress.optimizer_steps)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._steps is not None:
            self._steps.progress.optimizer_steps += 1
        return result
