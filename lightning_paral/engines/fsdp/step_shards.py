"""Shards that are unsharded for a whole step, however often the step runs their modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.layout import dtensor_like
from lightning_paral.compat.torch.fsdp import ForwardHooks, unsharded_param
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.distributed.mesh import ParallelDims, data_mesh
from lightning_paral.engines.fsdp.shard import ModuleSnapshot, Sharding, unshardable_parameters
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.gradients import local_part


class StepShards(Sharding):
    """Shards modules with FSDP2, without the hooks with which it unshards around each forward and backward pass.

    A step of a pipeline runs these passes for one micro-batch after the other. The parameters are unsharded once, when
    the step begins, and their gradients are scattered once, after its backward passes.

    Call `set_units`, then `shard` for each unit, then for the root, and then `finish`. Set `split` before `shard`.

    Args:
        root: the module that is sharded.
        dims: the arrangement of the ranks.
        mesh: the device mesh of the ranks of the stage, which are sharded over its last dimension but that of the
            tensor ranks.
    """

    def __init__(self, root: Module, dims: ParallelDims, mesh: DeviceMesh) -> None:
        super().__init__(root, data_mesh(mesh), None)
        self.mesh = mesh
        self._group_on_host = dims.stage_group()
        self._own: set[Module] = set()

    def shard(self, module: Module, parts: Sequence[Module]) -> None:
        """Shard the parameters of `parts`, which are on the device of this rank, as one unit.

        Args:
            module: the unit.
            parts: the unit and those of its submodules whose parameters are sharded with it.
        """
        unshardable = set(unshardable_parameters(module))
        snapshot = ModuleSnapshot(parts)
        self._prepare(parts, unshardable)
        own = _parameters_of(parts)
        self._snapshots.append(snapshot)
        self._own.update(parts)
        others = {part: set(vars(part)) for part in module.modules() if part not in self._own}
        ignored = {each for each in module.parameters() if each in unshardable or each not in own}
        self._fully_shard(module, ignored, reshard_after_forward=False)
        for part, attributes in others.items():  # of another stage: FSDP2 marks them without having their parameters
            for name in set(vars(part)) - attributes:
                del vars(part)[name]
        snapshot.mark_added()
        snapshot.free_full(list(parts))

    def finish(self) -> None:
        """Prepare steps, after the root is sharded."""
        self._hooks = [ForwardHooks(module) for module in self._sharded]
        if self.split is not None:
            self.split.install()
        self._let_code_write()
        for snapshot in self._snapshots:
            snapshot.mark_added()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Unshard all parameters inside the block. *Collective* over the ranks that hold shards."""
        try:
            for module in self._sharded:
                module.unshard()
            self.writes.keeps_unsharded = True
            yield
        finally:
            self.writes.keeps_unsharded = False
            self._check_nothing_was_loaded()
            for module in self._sharded:
                module.reshard()

    def _check_nothing_was_loaded(self) -> None:
        # FSDP2 takes the parameters that a module has after load_state_dict for shards.
        if not all(isinstance(param.sharded_param, DTensor) for param in self._params):
            raise ConfigurationError(
                "load_state_dict was called in a step, in which the shards of the stage are unsharded. Call it in a "
                "hook such as on_train_batch_end, or leave out ParalPipelineStrategy(shard=...)."
            )

    def take_gradients(self) -> list[tuple[Parameter, Tensor]]:
        """Remove and return the full gradients of the unsharded parameters, each with the shard that it belongs to."""
        taken = []
        for param in self._params:
            unsharded = unsharded_param(param)
            if unsharded is not None and unsharded.grad is not None:
                taken.append((param.sharded_param, local_part(unsharded.grad)))
                unsharded.grad = None
        return taken

    def scatter(self, gradients: list[tuple[Parameter, Tensor]]) -> None:
        """Add the means of full gradients over the data ranks to the gradients of the shards. *Collective*.

        A parameter that has no gradient on any of these ranks gets none; where only this rank has none, it is zero.

        Args:
            gradients: some of the shards, each with its full gradient on this rank. The list is emptied, so that the
                full gradients of a unit are freed when they are scattered.
        """
        of_shard = {id(shard): gradient for shard, gradient in gradients}
        gradients.clear()
        params = self._params
        has_gradient = torch.tensor([id(param.sharded_param) in of_shard for param in params], dtype=torch.uint8)
        if params:
            dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=self._group_on_host)
        for param, has in zip(params, has_gradient.tolist(), strict=True):
            if has:
                unsharded, gradient = unsharded_param(param), of_shard.pop(id(param.sharded_param), None)
                _set_gradient(unsharded, gradient)
        self._hooks[-1].end_backward()


def _parameters_of(parts: Sequence[Module]) -> dict[Parameter, None]:
    return dict.fromkeys(each for part in parts for each in own_parameters(part).values() if each is not None)


def _set_gradient(unsharded: Any, gradient: Tensor | None) -> None:
    """Set the gradient of an unsharded parameter, which is a DTensor if it is split over tensor ranks."""
    local = local_part(unsharded)
    if gradient is None:
        gradient = torch.zeros(local.shape, dtype=local.dtype, device=local.device)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    unsharded.grad = dtensor_like(dense, unsharded) if isinstance(unsharded, DTensor) else dense
