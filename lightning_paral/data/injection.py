"""What replaces Lightning's sampler injection in a run: each loader is handed on with the batches of this rank."""

import copy
import dataclasses
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import BatchSampler, DataLoader

from lightning_paral.compat.lightning.samplers import IndexBatchSampler, injects_sampler, replace_preparation
from lightning_paral.data import loader as loaders
from lightning_paral.data.exact_evaluation import ExactEvaluationLoops
from lightning_paral.data.global_order import GlobalOrder, Seed
from lightning_paral.data.iterable import ShardedIterable, in_agreement
from lightning_paral.data.order_rng import States
from lightning_paral.data.resume import DataPosition, Source, processed
from lightning_paral.data.sampler import RankBatchSampler, ShardSpec, too_few_batches
from lightning_paral.distributed.process_group import host_group
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import Sampling

_STEPS = {
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}


def draws_as_one_process(sampling: Sampling, world_size: int) -> bool:
    """Whether orders are drawn from the global random generators, as one process draws them."""
    return sampling.split == "global" or world_size == 1


class Injection:
    """The loaders of a run, from setup to teardown.

    Active at a world size of one, too, so that the order of batches is the same at all world sizes.

    Args:
        trainer: its loaders are spread unless it has `use_distributed_sampler=False`.
        sampling: how.
        seed: what all orders derive from; the same on every rank.
        run_padding: whether evaluation steps have collectives, which a rank has to join when its own data has ended.
    """

    def __init__(self, trainer: Trainer, sampling: Sampling, seed: int, run_padding: bool) -> None:
        self._trainer = trainer
        self._sampling = sampling
        self._seed = Seed(seed)
        self._run_padding = run_padding
        self.position = DataPosition(trainer, self._seed)
        self._num_loaders: dict[RunningStage, tuple[int, int]] = {}
        self._undo = ExitStack()
        self._injected_by_lightning = replace_preparation(trainer, self.prepare, self._undo)
        if trainer.world_size > 1:
            ExactEvaluationLoops(trainer, run_padding, self._undo)

    def end(self) -> None:
        """Give the trainer back its own ways. The position in the data can still be asked for."""
        self._undo.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the undo stack: a copy has changed nothing in the trainer."""
        return vars(self) | {"_undo": ExitStack()}

    def prepare(self, loader: object, shuffle: bool, mode: RunningStage) -> object:
        """Return `loader` with this rank's batches. *Collective* where a dataset shards itself."""
        injects = injects_sampler(self._trainer)
        if injects and not isinstance(loader, DataLoader) and self._trainer.world_size > 1:
            # As under Lightning's ddp. It may have been written for several ranks.
            rank_zero_warn(
                f"{type(loader).__name__} is no DataLoader, so it is not divided: each of {self._trainer.world_size} "
                "ranks takes everything that it yields. Unless it divides its data by rank itself, wrap it in a "
                "DataLoader (with batch_size=None if it yields batches), which is divided among the ranks."
            )
        if not isinstance(loader, DataLoader) or not injects or loaders.is_distributed(loader):
            return self._injected_by_lightning(loader, shuffle, mode)
        training = mode == RunningStage.TRAINING
        shard = ShardSpec(
            rank=self._trainer.global_rank,
            world_size=self._trainer.world_size,
            split=self._sampling.split,
            remainder=self._sampling.remainder if training else "pad",
        )
        number = self._number_of(mode)
        if training and number == 0:
            self.position.sources = []
        source: Source
        if not loaders.is_stream(loader):
            changed, source = self._spread(loader, shard, number, mode)
        elif self._sampling.shard_iterable and not loaders.shards_itself(loader):
            changed, source = self._shard(loader, shard, number)
        else:
            return self._strip_padding(self._agree(loader, shard), mode)
        source.set_epoch(self._epoch)
        if training and not loaders.resumes_itself(loader):
            self.position.sources.append(source)
        return self._strip_padding(changed, mode)

    def _strip_padding(self, loader: loaders.Loader, mode: RunningStage) -> loaders.Loader:
        """Return the loader without fillers, for a step that draws its batches itself, from a `dataloader_iter`."""
        step = _STEPS.get(mode)
        module = self._trainer.lightning_module
        if step is None or not is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            return loader
        if self._run_padding and self._trainer.world_size > 1:
            raise ConfigurationError(
                f"{type(module).__name__}.{step} takes a `dataloader_iter` and draws its batches itself, but under "
                f"{type(self._trainer.strategy).__name__} ranks that run out of data have to join in the steps of the "
                "others. Let it take `batch, batch_idx`."
            )
        return loaders.with_iteration(loader, loaders.strip_padding)

    @property
    def _epoch(self) -> int:
        return processed(self._trainer.fit_loop.epoch_progress)

    def _number_of(self, mode: RunningStage) -> int:
        """Return which loader of its kind this is: the first that is asked for in an epoch has number 0."""
        epoch, number = self._num_loaders.get(mode, (-1, 0))
        number = number + 1 if epoch == self._epoch else 0
        self._num_loaders[mode] = self._epoch, number
        return number

    def _spread(
        self, loader: loaders.Loader, shard: ShardSpec, number: int, mode: RunningStage
    ) -> tuple[loaders.Loader, RankBatchSampler]:
        """Spread a dataset with indices."""
        batches: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        if mode == RunningStage.PREDICTING and getattr(batches, "drop_last", False):
            batches = copy.copy(batches)
            batches.drop_last = False  # as Lightning does
        order = GlobalOrder(
            batches=batches,
            seed=self._seed,
            number=number,
            batched=loader.batch_sampler is not None,
            compare=partial(self._compare, batches.sampler if type(batches) is BatchSampler else batches)
            if shard.world_size > 1
            else None,
            shared=draws_as_one_process(self._sampling, shard.world_size),
            agree=self._of_rank_0 if shard.world_size > 1 else None,
            samplers=loaders.samplers(loader),
        )
        if shard.remainder != "pad":
            _check_training(order, shard, loader.batch_size)
        elif not order.batched:
            shard = dataclasses.replace(shard, split="batch")
        sampler = RankBatchSampler(order, shard)
        if mode == RunningStage.PREDICTING and order.batched:
            # For prediction writers, which ask for the indices of a batch.
            changed = loaders.with_sampler(loader, sampler)
            changed.__dict__["batch_sampler"] = IndexBatchSampler(sampler)
            return changed, sampler
        return loaders.with_sampler(loader, sampler), sampler

    def _shard(self, loader: loaders.Loader, shard: ShardSpec, number: int) -> tuple[loaders.Loader, ShardedIterable]:
        """Spread a stream that every rank can read as a whole."""
        name = type(loader.dataset).__name__
        batch_size = loader.batch_size or 1
        if shard.split == "global" and batch_size % shard.world_size:
            if shard.remainder != "pad":
                raise ConfigurationError(
                    f"split='global' divides each batch of {name} among {shard.world_size} ranks, but the loader's "
                    f"batch_size={loader.batch_size}. Make it a multiple of the number of ranks, or set split='batch'."
                )
            shard = dataclasses.replace(shard, split="batch")
        if shard.world_size > 1:
            rank_zero_info(
                f"{name} is an iterable dataset: each of {shard.world_size} ranks x {max(1, loader.num_workers)} "
                "workers reads all of it and keeps its part. If it looks at the rank or the worker itself, set "
                "shard_iterable=False."
            )
        stream = ShardedIterable(
            cast(Iterable[Any], loader.dataset), shard, batch_size, loader.drop_last, self._seed, number
        )
        return loaders.with_stream(loader, stream), stream

    def _agree(self, loader: loaders.Loader, shard: ShardSpec) -> loaders.Loader:
        """Leave a stream that shards itself, and let it end on all ranks at once. *Collective*."""
        if shard.world_size == 1:
            return loader
        rank_zero_info(
            f"{type(loader.dataset).__name__} is left to shard itself. Its ranks may end unevenly, so they agree at "
            "each batch whether to go on."
        )

        def any_has(flag: bool) -> bool:
            return self._agreed(flag, dist.ReduceOp.MAX)

        def all_have(flag: bool) -> bool:
            return self._agreed(flag, dist.ReduceOp.MIN)

        def iterate(batches: Any, restart: Callable[[], Any]) -> Any:
            agreed = in_agreement(batches, restart, shard, any_has, all_have)
            return loaders.mark_maybe_uneven(agreed) if shard.remainder == "pad" else agreed

        try:
            length = len(loader)
        except TypeError:
            length = -1
        lengths = self._gather(length)
        if min(lengths) < 0:
            return loaders.with_iteration(loader, iterate)
        return loaders.with_iteration(loader, iterate, min(lengths) if shard.remainder == "drop" else max(lengths))

    def _agreed(self, flag: bool, operation: Any) -> bool:
        # On the host: this runs for each batch, and reading from a device would wait for everything queued there.
        tensor = torch.tensor(int(flag), device="cpu")
        dist.all_reduce(tensor, op=operation, group=host_group())
        return bool(tensor)

    def _gather(self, number: int) -> list[int]:
        ours = torch.tensor([number], device="cpu")
        gathered = [torch.zeros_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, ours, group=host_group())
        return [int(each) for each in gathered]

    def _of_rank_0(self, states: States) -> States:
        shared = [states]
        dist.broadcast_object_list(shared, src=0, group=host_group())
        return shared[0]

    def _compare(self, sampler: object, checksum: int) -> None:
        checksums = self._gather(checksum)
        if len(set(checksums)) > 1:
            different = [rank for rank, each in enumerate(checksums) if each != checksums[0]]
            raise ConfigurationError(
                f"The {type(sampler).__name__} draws other batches on rank {different[0]} than on rank 0. Every rank "
                "has to draw the same ones, of which it keeps its part: let the sampler draw from torch's, numpy's or "
                "random's global generator or from one seeded alike, and not look at the rank; or set "
                "Trainer(use_distributed_sampler=False) if it spreads the samples itself."
            )

    def loss_weight(self) -> float:
        """Return what this rank's mean loss counts in the mean over ranks, if they have shares of different sizes."""
        if self._sampling.split == "batch" or len(self.position.sources) != 1:
            return 1.0
        (source,) = self.position.sources
        if isinstance(source, ShardedIterable):
            return 1.0
        return source.loss_weights.get(self._trainer.fit_loop.epoch_loop.batch_idx, 1.0)


def _check_training(order: GlobalOrder, shard: ShardSpec, batch_size: int | None) -> None:
    num_batches = order.num_batches()
    if shard.split == "global" and not order.batched:
        raise ConfigurationError(
            "split='global' divides the batches of the training loader, but it has batch_size=None and leaves batching "
            "to its dataset. Give it a batch size, or set split='batch'."
        )
    if shard.split == "global" and batch_size is not None and batch_size < shard.world_size:
        raise ConfigurationError(
            f"split='global' divides each batch among {shard.world_size} ranks, but the training loader has "
            f"batch_size={batch_size}. Make it at least the number of ranks, or set split='batch'."
        )
    if num_batches and not shard.num_steps(num_batches):
        raise too_few_batches(order.batches, shard.world_size)
