"""Replace Lightning's sampler injection: distribute every loader of a run among the data ranks."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from lightning_paral.compat.lightning.evaluation import injects_sampler, replace_preparation, set_results_of_fit
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.data.division import Mark, ShardSpec, strip_padding
from lightning_paral.data.evaluation import ExactEvaluationLoops
from lightning_paral.data.iterable import distribute_iterable, is_stateful, synchronize_self_sharded
from lightning_paral.data.loaders import (
    Loader,
    distribute_map_style,
    draws_as_one_process,
    samplers,
    seed_workers_by_data_rank,
    with_iteration,
)
from lightning_paral.data.logged_keys import LoggedHistory
from lightning_paral.data.metrics import gather_over_data_ranks
from lightning_paral.data.order import Seed
from lightning_paral.data.own_draws import OwnDraws
from lightning_paral.data.results import EVEN, TrainingResults
from lightning_paral.data.resume import DataPosition, Source, is_divided, keep_states, num_processed
from lightning_paral.distributed.exchange import all_ranks
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.rng_state import restore_states, without_cuda_states
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import Sampling

_STEPS = {
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}


_KEY = "lightning_paral.data"


class RunData:
    """Distributes the loaders of each run over the ranks, and resumes a fit at the position in its checkpoint.

    A strategy has one `RunData` for all its runs, so that a checkpoint saved after a fit contains the position of the
    fit. Each run calls `begin` and `end`. `load` and `resume` have an effect only in a fit that resumes.
    """

    def __init__(self) -> None:
        self._injection: LoaderDistributor | None = None
        self._position: DataPosition | None = None
        """The position of the last fit; before the first fit, that of the last evaluation."""
        self._has_fit = False
        self._dims = ParallelDims()
        self._sampling = Sampling()
        self._saved_position: dict[str, Any] | None = None
        self._random_states: Sequence[dict[str, Any]] = ()

    def begin(
        self, trainer: Trainer, dims: ParallelDims, sampling: Sampling, seed: int, *, forward_has_collectives: bool
    ) -> None:
        """Replace Lightning's sampler injection until `end`.

        Args:
            trainer: the Trainer of the run.
            dims: the arrangement of the ranks; it says which ranks draw different samples.
            sampling: how the samples are distributed over these ranks.
            seed: the seed of every order of samples, equal on all ranks.
            forward_has_collectives: whether ranks that run out of data run padding batches in evaluation.
        """
        self._dims, self._sampling, self._saved_position = dims, sampling, None
        self._injection = LoaderDistributor(trainer, dims, sampling, seed, run_padding=forward_has_collectives)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit or not self._has_fit:
            self._position = self._injection.position
        self._has_fit = self._has_fit or is_fit

    def end(self) -> None:
        """Restore Lightning's sampler injection. The position can still be saved."""
        if self._injection is not None:
            self._injection.end()

    def loss_weight(self) -> float:
        """Return the weight of this rank's loss in the mean over ranks; 1.0 if all have the same number of samples."""
        return 1.0 if self._injection is None else self._injection.current_mark().weight

    def with_position(self, checkpoint: dict[str, Any], *, with_all_ranks: bool = True) -> dict[str, Any]:
        """Return `checkpoint` with the position in the data added, unless it contains only weights.

        *Collective* over the world if a training loader saves its own state.

        Args:
            checkpoint: a checkpoint in Lightning's format.
            with_all_ranks: whether all ranks call this. Otherwise such a state is that of this rank.
        """
        if self._position is None or "loops" not in checkpoint:
            return checkpoint
        return {**checkpoint, _KEY: self._position.state(with_all_ranks=with_all_ranks)}

    def load(self, checkpoint: dict[str, Any], random_states: Sequence[dict[str, Any]] | None) -> None:
        """Remove the position from `checkpoint`, and keep it for `resume`.

        Args:
            checkpoint: a loaded checkpoint of any strategy. Checkpoints that Lightning's own strategies saved have no
                position.
            random_states: the random states of all ranks, as saved with the position; `None` in evaluation, which does
                not resume.
        """
        position = checkpoint.pop(_KEY, None)
        if random_states is not None:
            self._saved_position, self._random_states = position, random_states
            if position is not None:
                # Lightning would load rank 0's states of loaders on all ranks, and also where the position is enough.
                checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)

    def resume(self, devices: Sequence[torch.device]) -> bool:
        """Move the training loaders to the loaded position. *Collective* over the world if a position was loaded.

        Args:
            devices: the devices of this process; their random generators are restored.

        Returns:
            bool: whether the position is inside an epoch, whose earlier batches are skipped.
        """
        is_inside_epoch = False
        if self._saved_position is not None and self._injection is not None:
            is_inside_epoch = self._injection.position.resume(
                self._saved_position, lambda: self._restore_random_states(devices)
            )
        self._saved_position, self._random_states = None, ()
        return is_inside_epoch

    def _restore_random_states(self, devices: Sequence[torch.device]) -> None:
        states, num_ranks = self._random_states, self._dims.num_ranks
        if len(states) == num_ranks:
            restore_states(list(states), all_ranks(), devices)
        elif states and draws_as_one_process(self._sampling, self._dims.data_size):
            # Orders of later epochs are drawn from rank 0's generators. If the module draws no random numbers, the
            # generators of all ranks are equal, so rank 0's states are right for any number of ranks.
            restore_states([without_cuda_states(states[0])] * num_ranks, all_ranks(), devices)


class LoaderDistributor:
    """Distributes the loaders of a run among the ranks, from setup to teardown.

    Also active at world size 1, so that the order of batches is the same at all world sizes.

    Args:
        trainer: the Trainer whose loaders are distributed, unless it has `use_distributed_sampler=False`.
        dims: the parallel dimensions, which say which ranks draw different samples.
        sampling: how to distribute the samples.
        seed: the seed of the order of samples in all loaders. It must be the same on every rank.
        run_padding: whether evaluation steps contain collectives, so that a rank without data must run padding batches.
    """

    def __init__(self, trainer: Trainer, dims: ParallelDims, sampling: Sampling, seed: int, run_padding: bool) -> None:
        self._trainer = trainer
        self._dims = dims
        self._sampling = sampling
        self._seed = Seed(seed)
        self._run_padding = run_padding
        self.position = DataPosition(trainer, self._seed)
        self._last_index: dict[RunningStage, tuple[int, int]] = {}  # epoch and index of the last loader prepared
        self._has_warned = False
        self._undo = ExitStack()
        self._prepare_with_lightning = replace_preparation(trainer, self.prepare, self._undo)
        self._own_draws: OwnDraws | None = None
        if dims.data_size > 1:
            self._own_draws = OwnDraws(trainer, dims.data_rank, self._undo, in_steps=sampling.split == "batch")
            history = LoggedHistory()
            ExactEvaluationLoops(trainer, dims, run_padding, self._undo, history)
            self._replace_training_results(history)
        gather_over_data_ranks(dims, self._undo)

    def end(self) -> None:
        """Restore the trainer's own methods. `position` can still be read."""
        self._undo.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the undo stack, because a copy has not changed the trainer."""
        return vars(self) | {"_undo": ExitStack()}

    def prepare(self, loader: object, shuffle: bool, mode: RunningStage) -> object:
        """Return what `_distribute` returns; in training, with the states of a loader that saves its own."""
        prepared = self._distribute(loader, shuffle, mode)
        if mode == RunningStage.TRAINING and isinstance(prepared, DataLoader) and not is_divided(prepared):
            return keep_states(prepared) if is_stateful(prepared) else prepared
        return prepared

    def _distribute(self, loader: object, shuffle: bool, mode: RunningStage) -> object:
        """Return a copy of `loader` that yields this rank's batches. *Collective* if the dataset shards itself.

        A loader is left to Lightning if it is not a `DataLoader`, if it has a distributed sampler, or if the trainer
        has `use_distributed_sampler=False`.

        Raises:
            ConfigurationError: the loader cannot be distributed as `Sampling` requires.
        """
        injects = injects_sampler(self._trainer)
        if injects and not isinstance(loader, DataLoader) and self._dims.data_size > 1:
            # Lightning's ddp does not divide it either: it may have been written for several ranks.
            rank_zero_warn(
                f"{type(loader).__name__} is not a DataLoader, so it is not divided: each of {self._dims.data_size} "
                "ranks uses everything that it yields. Unless it divides its data by rank itself, wrap it in a "
                "DataLoader (with batch_size=None if it yields batches), which is divided among the ranks."
            )
        if not isinstance(loader, DataLoader) or not injects or _is_distributed(loader):
            return self._prepare_with_lightning(loader, shuffle, mode)
        training = mode == RunningStage.TRAINING
        shard = ShardSpec(
            data_rank=self._dims.data_rank,
            data_size=self._dims.data_size,
            split=self._sampling.split,
            remainder=self._sampling.remainder if training else "pad",
        )
        index = self._index_of_next_loader(mode)
        if training and index == 0:
            self.position.sources = []
        name = f"{mode.value} {index}"
        distributed: Loader
        source: Source
        if not isinstance(loader.dataset, IterableDataset):
            predicting = mode == RunningStage.PREDICTING
            distributed, source = distribute_map_style(
                loader, shard, self._seed, index, self._dims, predicting=predicting
            )
        elif self._sampling.shard_iterable and not isinstance(loader.dataset, IterDataPipe):
            distributed, source = distribute_iterable(loader, shard, self._seed, index)
        else:
            self._check_data_pipe(loader)
            group = self._dims.data_rank_group().group
            distributed = synchronize_self_sharded(loader, shard, group)
            return self._strip_padding(self._drawing_own(distributed, name), mode)
        if training:
            source.rejects_repeated_samples = self._draws_itself("training_step")
            self.position.sources.append(source)
        source.set_epoch(self._epoch)
        return self._strip_padding(self._drawing_own(distributed, name), mode)

    def _drawing_own(self, loader: Loader, name: str) -> Loader:
        """Let the dataset draw random numbers of the data rank, in workers or in this process."""
        seed_workers_by_data_rank(loader, self._dims)
        if self._own_draws is None or loader.num_workers:
            return loader
        return with_iteration(loader, partial(self._own_draws.reading, name))

    def _check_data_pipe(self, loader: Loader) -> None:
        """Raise a `ConfigurationError` for a data pipe if ranks share a data rank: torch shards by global rank."""
        if isinstance(loader.dataset, IterDataPipe) and self._dims.data_size != self._dims.num_ranks:
            raise ConfigurationError(
                f"torch divides the data pipe {type(loader.dataset).__name__} among all {self._dims.num_ranks} ranks, "
                f"but only {self._dims.data_size} of them draw different samples. Use an IterableDataset instead."
            )

    def _strip_padding(self, loader: Loader, mode: RunningStage) -> Loader:
        """Remove padding batches if the step takes a `dataloader_iter` and therefore draws its batches itself."""
        step = _STEPS.get(mode)
        module = self._trainer.lightning_module
        if step is None or not self._draws_itself(step):
            return loader
        if self._run_padding and self._dims.data_size > 1:
            raise ConfigurationError(
                f"{type(module).__name__}.{step} takes a `dataloader_iter` and draws its batches itself, but under "
                f"{type(self._trainer.strategy).__name__} ranks that run out of data must join the steps of the "
                "others. Let it take `batch, batch_idx` instead."
            )
        return with_iteration(loader, strip_padding)

    def _draws_itself(self, step: str) -> bool:
        """Return whether the module's `step` takes a `dataloader_iter`, from which it draws batches itself."""
        method = getattr(self._trainer.lightning_module, step)
        return bool(is_param_in_hook_signature(method, "dataloader_iter", explicit=True))

    @property
    def _epoch(self) -> int:
        return num_processed(self._trainer.fit_loop.epoch_progress)

    def _index_of_next_loader(self, mode: RunningStage) -> int:
        """Return the index of the next loader among those of `mode`, which an epoch prepares in a fixed order."""
        epoch, index = self._last_index.get(mode, (-1, 0))
        index = index + 1 if epoch == self._epoch else 0
        self._last_index[mode] = self._epoch, index
        return index

    def _replace_training_results(self, history: LoggedHistory) -> None:
        """Count each sample once in values logged in training, and check that the ranks log the same keys."""
        loop, end_epoch = self._trainer.fit_loop, self._trainer.fit_loop.on_advance_end
        results = TrainingResults(self._trainer, self._dims, self.current_mark, history)
        set_results_of_fit(self._trainer, results)

        def join_and_end_epoch() -> None:
            with results.ending_epoch():
                end_epoch()

        shadow_method(loop, "on_advance_end", join_and_end_epoch, self._undo)
        self._undo.callback(results.end_step)

    def current_mark(self) -> Mark:
        """Return how the batch of the current training step is divided.

        It is uneven only with `split="global"`, if the size of a batch is not divisible by the number of ranks, so that
        they get different numbers of samples.
        """
        sources, step = self.position.sources, self._trainer.fit_loop.epoch_loop.batch_idx
        if self._sampling.split == "batch" or not sources:
            return EVEN
        marks = [source.marks.get(step, EVEN) for source in sources]
        if len({(mark.num_samples, mark.first) for mark in marks}) > 1:
            self._warn_about_unequal_loaders()
            return EVEN
        return marks[0]

    def _warn_about_unequal_loaders(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                "The training loaders divide their batches differently among the ranks in a step, so training does not "
                "equal that of one process: gradients and values logged with sync_dist=True are means over ranks with "
                "different numbers of samples. Give the loaders batch sizes that the number of ranks divides, and "
                "drop_last=True."
            )


def _is_distributed(loader: Loader) -> bool:
    """Return whether a sampler of the loader is torch's `DistributedSampler`, or has the same attributes."""
    return any(
        isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"))
        for sampler in samplers(loader)
    )
