"""Distribute the loaders of a run over the ranks, and keep the position in the data for checkpoints."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_paral.data import LoaderDistributor
from lightning_paral.data.loaders import draws_as_one_process
from lightning_paral.data.resume import DataPosition
from lightning_paral.distributed.exchange import all_ranks
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.rng_state import restore_states, without_cuda_states
from lightning_paral.options import Sampling

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
