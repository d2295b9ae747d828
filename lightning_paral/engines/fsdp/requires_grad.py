"""`requires_grad` under FSDP2: set on shards between steps and on unsharded parameters inside them."""

from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_paral.compat.torch.fsdp import groups_of, unsharded_param
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.requires_grad import TrainedParameters, TrainingAgreement, first_names


class TrainedShards:
    """Lets users freeze and unfreeze parameters during a fit, and checks that all ranks do the same.

    FSDP2 copies `requires_grad` from the shard whenever it unshards a parameter. If a training step sets it on the
    root's parameters, which stay unsharded throughout the step, the new value would be lost. Therefore `copy_to_shards`
    copies it to the shards.

    Args:
        root: the sharded LightningModule; all of its parameters are resharded.
        dims: the arrangement of the ranks.
        timeout: how long to wait for other ranks.
        undo: a stack; closing it ends the checks.
    """

    def __init__(self, root: Module, dims: ParallelDims, timeout: timedelta, undo: ExitStack) -> None:
        self._trained = TrainedParameters(root, undo)
        self._agreement = TrainingAgreement(self._trained, dims, timeout)
        self._root = root
        self._known = set(root.parameters())
        self._root_params = _sharded_params(root)
        self._at_start: list[bool] = []

    def before_batch(self, epoch: int, batch_idx: int) -> None:
        """Check that all ranks train the same parameters. *Collective* in an epoch's first step, and after changes.

        Raises:
            ConfigurationError: the ranks train different parameters, or a parameter is new and not sharded. The message
                names the parameters.
        """
        if not self._agreement.update(epoch, batch_idx):
            return
        parts = [part for part in self._root.modules() if isinstance(part, FSDPModule)]
        # With reshard_after_forward=False, an evaluation leaves parameters unsharded.
        known = self._known.union(unsharded_param(each) for part in parts for each in _sharded_params(part))
        new = [name for name, p in self._trained.by_name.items() if p not in known and not isinstance(p, DTensor)]
        if new:
            raise ConfigurationError(
                f"These parameters were added to the module after FSDP sharded it: {first_names(new)}. Their gradients "
                "would not be averaged over the ranks. Create them in __init__ or configure_model, or use paral_ddp."
            )

    def before_step(self) -> None:
        """Record which of the root's parameters are trained when a step begins."""
        self._at_start = [each.sharded_param.requires_grad for each in self._root_params]

    def copy_to_shards(self) -> None:
        """Copy `requires_grad` to the root's shards if the step has changed it on the unsharded parameters."""
        for number, each in enumerate(self._root_params):
            now = unsharded_param(each)
            if now is not None and now.requires_grad != self._at_start[number]:
                self._at_start[number] = now.requires_grad
                each.sharded_param.requires_grad_(now.requires_grad)


def _sharded_params(module: Any) -> list[Any]:
    """Return the `FSDPParam`s of the parameters that are unsharded together with `module`."""
    return [param for group in groups_of(module) for param in group.fsdp_params]
