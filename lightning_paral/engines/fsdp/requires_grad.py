"""`requires_grad` under FSDP2: of shards between steps, of gathered parameters inside them, the same on all ranks."""

from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_paral.compat.torch.fsdp_param import gathered
from lightning_paral.compat.torch.fsdp_state import groups_of
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.requires_grad import TrainedParameters, TrainingAgreement, first_names


class TrainedShards:
    """Lets parameters be frozen and unfrozen during a fit.

    FSDP2 gives a parameter `requires_grad` of its shard whenever it gathers it, so what a training step sets on the
    root's parameters, gathered for all of it, would be forgotten.

    Args:
        root: the sharded LightningModule, of which nothing is gathered now.
        timeout: how long other ranks are waited for.
        undo: takes what ends the watch over `requires_grad`.
    """

    def __init__(self, root: Module, timeout: timedelta, undo: ExitStack) -> None:
        self._trained = TrainedParameters(root, undo)
        self._agreement = TrainingAgreement(self._trained, timeout)
        self._root = root
        self._known = set(root.parameters())
        self._of_root = _sharded_params(root)
        self._at_start: list[bool] = []

    def before_batch(self, epoch: int, batch_idx: int) -> None:
        """Check that all ranks train the same. *Collective* in the first step of an epoch, and where that changed.

        Raises:
            ConfigurationError: the ranks disagree, or a parameter is new and not sharded; names the parameters.
        """
        if not self._agreement.update(epoch, batch_idx):
            return
        parts = [part for part in self._root.modules() if isinstance(part, FSDPModule)]
        # What an evaluation gathered may stay so: reshard_after_forward=False.
        known = self._known.union(gathered(each) for part in parts for each in _sharded_params(part))
        new = [name for name, p in self._trained.by_name.items() if p not in known and not isinstance(p, DTensor)]
        if new:
            raise ConfigurationError(
                f"These parameters came into the module after FSDP sharded it: {first_names(new)}. Their gradients "
                "would not be averaged over the ranks. Make them in __init__ or configure_model, or use paral_ddp."
            )

    def before_step(self) -> None:
        """Note what is trained when a step begins."""
        self._at_start = [each.sharded_param.requires_grad for each in self._of_root]

    def carry_over(self) -> None:
        """Give the root's shards `requires_grad` that the step has set on them while they were gathered."""
        for number, each in enumerate(self._of_root):
            now = gathered(each)
            if now is not None and now.requires_grad != self._at_start[number]:
                self._at_start[number] = now.requires_grad
                each.sharded_param.requires_grad_(now.requires_grad)


def _sharded_params(module: Any) -> list[Any]:
    """Return FSDP2's records of the parameters that are gathered with `module`."""
    return [param for group in groups_of(module) for param in group.fsdp_params]
