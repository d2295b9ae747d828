"""The data of a run: its loaders, spread over the ranks, and the position in them that checkpoints keep."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_paral.data import LoaderDistributor
from lightning_paral.data.distribute import draws_as_one_process
from lightning_paral.data.resume import DataPosition
from lightning_paral.distributed.agreement import all_ranks
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.rng_state import restore_states, without_cuda_states
from lightning_paral.options import Sampling

_KEY = "lightning_paral.data"


class RunData:
    """Spreads the loaders of each run over the ranks, and resumes a fit at the position that its checkpoint has.

    A strategy has one of these for all its runs: the position of the last fit is saved after it, too. Each run calls
    `begin` and `end`; `load` and `resume` only have an effect in a fit that resumes from a checkpoint.
    """

    def __init__(self) -> None:
        self._injection: LoaderDistributor | None = None
        self._position: DataPosition | None = None
        """Of the last fit; of the last run if there was none."""
        self._dims = ParallelDims()
        self._sampling = Sampling()
        self._saved_position: dict[str, Any] | None = None
        self._random_states: Sequence[dict[str, Any]] = ()

    def begin(
        self, trainer: Trainer, dims: ParallelDims, sampling: Sampling, seed: int, *, forward_has_collectives: bool
    ) -> None:
        """Take the place of Lightning's sampler injection for the run that begins.

        Args:
            trainer: of the run.
            dims: which ranks draw samples of their own.
            sampling: how samples are spread over these ranks.
            seed: determines every order of samples; the same on all ranks.
            forward_has_collectives: whether ranks without data run padding batches in evaluation.
        """
        self._dims, self._sampling, self._saved_position = dims, sampling, None
        self._injection = LoaderDistributor(trainer, dims, sampling, seed, run_padding=forward_has_collectives)
        if self._position is None or trainer.state.fn == TrainerFn.FITTING:
            self._position = self._injection.position

    def end(self) -> None:
        """Restore Lightning's sampler injection. The position can still be saved."""
        if self._injection is not None:
            self._injection.end()

    def loss_weight(self) -> float:
        """Return the weight of this rank's mean loss in the mean over ranks; 1.0 where all have as many samples."""
        return 1.0 if self._injection is None else self._injection.loss_weight()

    def with_position(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return `checkpoint` with the position in the data, unless it holds only weights."""
        if self._position is None or "loops" not in checkpoint:
            return checkpoint
        return {**checkpoint, _KEY: self._position.state()}

    def load(self, checkpoint: dict[str, Any], random_states: Sequence[dict[str, Any]] | None) -> None:
        """Remove the position from `checkpoint`, and keep it for `resume`.

        Args:
            checkpoint: of any strategy or of Lightning; a position need not be in it.
            random_states: of all ranks, as saved with the position; `None` outside of a fit, which does not resume.
        """
        position = checkpoint.pop(_KEY, None)
        if random_states is not None:
            self._saved_position, self._random_states = position, random_states

    def resume(self, devices: Sequence[torch.device]) -> bool:
        """Move the training loaders to the loaded position, if there is one. *Collective* over the world then.

        Args:
            devices: of this process, whose random generators are restored.

        Returns:
            bool: whether that is inside an epoch, of which earlier batches are skipped.
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
            # Orders of later epochs are drawn from rank 0's generators. Where the module draws nothing, all ranks have
            # the same.
            restore_states([without_cuda_states(states[0])] * num_ranks, all_ranks(), devices)
