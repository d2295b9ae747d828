"""Replace Lightning's sampler injection: distribute every loader of a run among the data ranks."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, IterableDataset

from lightning_paral.compat.lightning.loops import replace_preparation
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.strategies import injects_sampler
from lightning_paral.data.evaluation import ExactEvaluationLoops
from lightning_paral.data.iterable import distribute_iterable, synchronize_self_sharded
from lightning_paral.data.loaders import (
    Loader,
    distribute_map_style,
    draws_as_one_process,
    samplers,
    seed_workers_by_data_rank,
    with_iteration,
)
from lightning_paral.data.metrics import gather_over_data_ranks
from lightning_paral.data.results import LoggedHistory, TrainingResults
from lightning_paral.data.resume import DataPosition, Source, keep_states
from lightning_paral.data.sampler import EVEN, Mark, Seed, ShardSpec
from lightning_paral.distributed.exchange import all_ranks
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.rng_state import (
    derive_seed,
    digest_of_torch_state,
    own_numbers,
    restore_states,
    shared_numbers,
    without_cuda_states,
)
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import Sampling

_STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}
_TRANSFERS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
_OF_ALL_RANKS = "optimizer_step", "save_checkpoint"  # which a step calls in manual optimization
_KEY = "lightning_paral.data"


class RunData:
    """Distributes the loaders of each run over the ranks, and resumes a fit at the position in its checkpoint.

    Loaders are distributed at any world size, also 1, so that the order of batches is the same at all of them.

    A strategy has one `RunData` for all its runs, so that a checkpoint saved after a fit contains the position of the
    fit. Each run calls `begin` and `end`. `load` and `resume` have an effect only in a fit that resumes.
    """

    _trainer: Trainer
    _prepare_with_lightning: Callable[[object, bool, RunningStage], object]

    def __init__(self) -> None:
        self._position: DataPosition | None = None  # of the last fit
        self._dims = ParallelDims()
        self._sampling = Sampling()
        self._seed = Seed(0)
        self._own_draws: OwnDraws | None = None
        self._num_prepared: Counter[tuple[RunningStage, int]] = Counter()
        self._saved_position: dict[str, Any] | None = None
        self._random_states: Sequence[dict[str, Any]] = ()
        self._undo = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the undo stack, because a copy has not changed the trainer."""
        return vars(self) | {"_undo": ExitStack()}

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
        self._trainer, self._dims, self._sampling = trainer, dims, sampling
        self._seed, self._saved_position, self._own_draws = Seed(seed), None, None
        self._num_prepared.clear()
        if trainer.state.fn == TrainerFn.FITTING:
            self._position = DataPosition(trainer, self._seed)
        self._prepare_with_lightning = replace_preparation(trainer, self._prepare, self._undo)
        if dims.data_size > 1:
            self._own_draws = OwnDraws(trainer, dims.data_rank, self._undo, in_steps=sampling.split == "batch")
            history = LoggedHistory(dims)
            ExactEvaluationLoops(trainer, history, self._undo, run_padding=forward_has_collectives)
            TrainingResults(trainer, history, self._current_mark, self._undo)
        gather_over_data_ranks(dims, self._undo)

    def end(self) -> None:
        """Restore Lightning's sampler injection. The position can still be saved."""
        self._undo.close()

    def loss_weight(self) -> float:
        """Return the weight of this rank's loss in the mean over ranks; 1.0 if all have the same number of samples.

        Raises:
            ConfigurationError: the ranks have different numbers, in a step that draws its batches itself.
        """
        mark = self._current_mark()
        if mark.weight != 1.0 and self._draws_itself("training_step"):
            raise ConfigurationError(
                f"{self._dims.data_size} ranks do not divide a batch of {mark.num_samples} samples, and training_step "
                "takes a `dataloader_iter` and draws its batches itself, so what it logs cannot be weighted. Set "
                "drop_last=True in the loader, or let training_step take `batch, batch_idx`."
            )
        return mark.weight

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
        saved, is_inside_epoch = self._saved_position, False
        if saved is not None and self._position is not None:
            is_inside_epoch = self._position.resume(saved, partial(self._restore_random_states, devices))
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

    # Loaders

    def _prepare(self, loader: object, shuffle: bool, mode: RunningStage) -> object:
        """Return a copy of `loader` that yields this rank's batches. *Collective* if the dataset shards itself.

        A loader is left to Lightning if it is not a `DataLoader`, if it has a distributed sampler, or if the trainer
        has `use_distributed_sampler=False`. A training loader that is not divided keeps its own states, if it has any.

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
        training = mode == RunningStage.TRAINING
        if not isinstance(loader, DataLoader) or not injects or _is_distributed(loader):
            prepared = self._prepare_with_lightning(loader, shuffle, mode)
            return keep_states(prepared) if training else prepared
        step = _STEPS.get(mode, "validation_step")
        if not training and self._dims.data_size > 1 and self._draws_itself(step):
            raise ConfigurationError(
                f"{type(self._trainer.lightning_module).__name__}.{step} takes a `dataloader_iter` and draws its "
                f"batches itself, but {self._dims.data_size} ranks evaluate each sample once, so some run out of data "
                "before others. Let it take `batch, batch_idx` instead."
            )
        shard = ShardSpec(
            data_rank=self._dims.data_rank,
            data_size=self._dims.data_size,
            split=self._sampling.split,
            remainder=self._sampling.remainder if training else "pad",
        )
        index = self._num_prepared[mode, self._epoch]  # an epoch prepares the loaders of a mode in a fixed order
        self._num_prepared[mode, self._epoch] += 1
        if training and index == 0:
            self._sources.clear()
        loader = seed_workers_by_data_rank(loader, self._dims)
        predicting = mode == RunningStage.PREDICTING
        divided: tuple[Loader, Source] | None = None
        if not isinstance(loader.dataset, IterableDataset):
            divided = distribute_map_style(
                loader, shard, self._seed, index, self._dims.num_ranks, predicting=predicting
            )
        elif self._sampling.shard_iterable:
            shard = replace(shard, split="batch") if predicting else shard
            divided = distribute_iterable(loader, shard, self._seed, index)
        if divided is not None:
            loader, source = divided
            source.set_epoch(self._epoch)
            if training:
                self._sources.append(source)
        else:
            loader = synchronize_self_sharded(loader, shard, self._dims.data_rank_group().group)
        if self._own_draws is not None and not loader.num_workers:
            loader = with_iteration(loader, partial(self._own_draws.reading, f"{mode.value} {index}"))
        return keep_states(loader) if training and divided is None else loader

    @property
    def _sources(self) -> list[Source]:
        return [] if self._position is None else self._position.sources

    @property
    def _epoch(self) -> int:
        progress: Any = self._trainer.fit_loop.epoch_progress
        return int(progress.current.processed)

    def _draws_itself(self, step: str) -> bool:
        """Return whether the module's `step` takes a `dataloader_iter`, from which it draws batches itself."""
        method = getattr(self._trainer.lightning_module, step)
        return bool(is_param_in_hook_signature(method, "dataloader_iter", explicit=True))

    def _current_mark(self) -> Mark:
        """Return how the batch of the current training step is divided.

        It is uneven only with `split="global"`, if the size of a batch is not divisible by the number of ranks, so that
        they get different numbers of samples.
        """
        if self._sampling.split == "batch" or not self._sources:
            return EVEN
        step = self._trainer.fit_loop.epoch_loop.batch_idx
        marks = [source.marks.get(step, EVEN) for source in self._sources]
        if len({(mark.num_samples, mark.first) for mark in marks}) == 1:
            return marks[0]
        rank_zero_warn(
            "The training loaders divide their batches differently among the ranks in a step, so gradients and values "
            "logged with sync_dist=True are means over ranks with different numbers of samples. Give the loaders batch "
            "sizes that the number of ranks divides, and drop_last=True."
        )
        return EVEN


def _is_distributed(loader: Loader) -> bool:
    """Return whether a sampler of the loader has the attributes of torch's `DistributedSampler`."""
    return any(hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") for sampler in samplers(loader))


class OwnDraws:
    """Seeds the global generators with numbers of this data rank, until the end of a step or of reading a batch.

    The seeds follow from the state of torch's generator, the number of the batch, and the data rank. They change
    nothing outside: all ranks continue with equal numbers in hooks and optimizers, and checkpoints need nothing else.

    Args:
        trainer: the Trainer.
        data_rank: the data rank.
        undo: what the end of the run closes.
        in_steps: whether steps draw numbers of the data rank, until `undo` is closed.
    """

    _trainer: Trainer | None = None
    """`None` in a copy, which belongs to no run."""

    def __init__(self, trainer: Trainer, data_rank: int, undo: ExitStack, *, in_steps: bool) -> None:
        self._trainer = trainer
        self._data_rank = data_rank
        self._place: object = None
        self._counts: Counter[str] = Counter()
        strategy = trainer.strategy
        users = [each for each in (trainer.lightning_module, vars(trainer).get("datamodule")) if each is not None]
        transfers = any(is_overridden(name, user) for name, user in product(_TRANSFERS, users))
        for name in (*_STEPS.values(), *["batch_to_device"] * transfers) if in_steps else ():
            shadow_method(strategy, name, self._drawing(name)(getattr(strategy, name)), undo)
        for name in _OF_ALL_RANKS:
            shadow_method(strategy, name, shared_numbers()(getattr(strategy, name)), undo)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        assert self._trainer is not None
        place = digest_of_torch_state(), self._trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if place != self._place:
            self._place, self._counts = place, Counter()
        self._counts[name] += 1
        with own_numbers(derive_seed(*place, name, self._counts[name], self._data_rank)):
            yield

    def reading(self, loader: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches` of the loader of this name, which this process reads from the dataset itself."""
        while True:
            with nullcontext() if self._trainer is None else self._drawing(loader):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
