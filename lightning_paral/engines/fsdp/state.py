"""The state of a module under FSDP, whose shards are DTensors."""

from collections.abc import Callable, Sequence

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_paral.checkpoint.optimizer_state import EndedOptimizers
from lightning_paral.checkpoint.sharded_state import ShardedState, WeightShards
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.engines.fsdp.run import FSDPRun
from lightning_paral.model.host_memory_check import host_memory_shortage


class FSDPState(ShardedState):
    """The state of the module of `run`, whose parameters are DTensors.

    Args:
        run: the current run.
        optimizers: the optimizers of the fit; if the run is an evaluation, those of an earlier fit.
        ended: the optimizers of past runs.
        is_failing: whether an exception has ended the run, perhaps in the middle of a step.
        reachable: after an exception, returns all ranks if they raised together, otherwise `None`.
        ranks_per_node: number of ranks that share the memory of a node.
    """

    def __init__(
        self,
        run: FSDPRun,
        optimizers: Sequence[Optimizer],
        ended: EndedOptimizers,
        is_failing: bool,
        reachable: Callable[[], RankGroup | None],
        ranks_per_node: int,
    ) -> None:
        super().__init__(run.module, optimizers, run.device, ended)
        self._run = run
        self._is_failing = is_failing
        self._reachable = reachable
        self._ranks_per_node = ranks_per_node

    def collect_writes(self) -> None:
        """Reshard parameters after a failed step. Otherwise do nothing, because `Module.state_dict` reshards."""
        if self._is_failing:
            self._run.sharded.reshard()

    def weight_shards(self) -> WeightShards:
        """Return the local tensors of the parameters. No collective."""
        return FSDPShards(self._run.module)

    def restore(self, ended: EndedOptimizers, *, failed: bool) -> None:
        """Restore the module: its submodules get back their own parameters, with full values, on CPU.

        *Collective* over the world, unless some of the ranks failed. If only some failed, or any on GPUs, or if a node
        lacks memory, parameters stay sharded, with a warning.

        Args:
            ended: takes over the states of the optimizers of a fit.
            failed: whether an exception ended a run with several ranks.
        """
        run, sharded = self._run, self._run.sharded
        run.stop_watching()
        if not failed:
            obstacle = host_memory_shortage(sharded.num_bytes, self._ranks_per_node)
        elif run.device.type != "cpu":
            obstacle = "the run failed"  # which has aborted NCCL
        else:
            obstacle = None if self._reachable() else "the run failed on some of its ranks only"
        if obstacle is not None:
            rank_zero_warn(f"{type(run.module).__name__} stays sharded: {obstacle}.")
        originals = sharded.restore(obstacle)
        if run.is_fit and originals:
            for optimizer in self.optimizers:
                ended.keep(optimizer, run.module, None, originals)
        if obstacle is None:
            run.module.cpu()


class FSDPShards(WeightShards):
    """The local tensors of the parameters of a sharded module."""

    def prepare(self) -> None:
        """Reshard unsharded parameters, which copies what user code wrote to them to the shards."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def current(self) -> list[Tensor]:
        """Return the local tensors of sharded parameters, and other parameters in full."""
        self.prepare()  # an evaluation with reshard_after_forward=False leaves parameters unsharded
        return super().current()
