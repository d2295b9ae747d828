"""Shards that are unsharded for a whole step, however often the step runs their modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.fsdp import ForwardHooks, keep_unsharded, unsharded_param
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.distributed.mesh import ParallelDims, data_mesh
from lightning_paral.engines.fsdp.gradients import scatter_gradients
from lightning_paral.engines.fsdp.refusals import explanation
from lightning_paral.engines.fsdp.shard import LEFT_SHARDED, ModuleSnapshot, Sharding, unshardable_parameters
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.checks import explain
from lightning_paral.model.gradients import local_part
from lightning_paral.model.units import Units


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
        self._group_on_host = dims.replica_group()
        self._units: Units | None = None
        self._snapshots: dict[Module, ModuleSnapshot] = {}
        self.replicated: list[Parameter] = []
        """The parameters that each rank holds in full, because FSDP2 cannot shard them."""
        self.is_unsharded = False
        """Whether a step is running."""

    def set_units(self, units: Units) -> None:
        """Set the units of the root, of which a stage has some.

        Raises:
            ConfigurationError: the trained parameters of a unit have different dtypes.
        """
        self._units = units
        self._check_dtypes(units)

    def shard(self, module: Module, parts: Sequence[Module]) -> None:
        """Shard the parameters of `parts`, which are on the device of this rank, as one unit.

        Args:
            module: the unit.
            parts: the unit and those of its submodules whose parameters are sharded with it.
        """
        unshardable = set(unshardable_parameters(module, self._mesh.size(-1)))
        self.replicated += [each for each in _parameters_of(parts) if each in unshardable]
        snapshot = ModuleSnapshot(parts)
        self._prepare(parts, unshardable)
        own = _parameters_of(parts)
        self._snapshots.update(dict.fromkeys(parts, snapshot))
        others = {part: set(vars(part)) for part in module.modules() if part not in self._snapshots}
        ignored = {each for each in module.parameters() if each in unshardable or each not in own}
        self._fully_shard(module, ignored, reshard_after_forward=False)
        for part, attributes in others.items():  # of another stage: FSDP2 marks them without having their parameters
            for name in set(vars(part)) - attributes:
                del vars(part)[name]
        snapshot.mark_added()
        snapshot.free_full(list(parts))

    def finish(self) -> None:
        """Prepare steps, after the root is sharded."""
        for module in self._sharded:
            ForwardHooks(module)
        if self.split is not None:
            self.split.install()
        self._let_code_write(lambda: self.is_unsharded)
        for snapshot in dict.fromkeys(self._snapshots.values()):
            snapshot.mark_added()
        for group in self._groups:
            keep_unsharded(group, lambda: self.is_unsharded)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Unshard all parameters inside the block. *Collective* over the ranks that hold shards."""
        try:
            for module in self._sharded:
                module.unshard()
            self.is_unsharded = True
            yield
        finally:
            self.is_unsharded = False
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
        """Add the means of full gradients over the ranks that hold shards to the gradients of these. *Collective*.

        A parameter that has no gradient on any of these ranks gets none.

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
        has = iter(has_gradient.tolist())
        for group in self._groups:
            trained = [param for param in group.fsdp_params if next(has)]
            for dtype in dict.fromkeys(param.orig_dtype for param in trained):
                similar = [param for param in trained if param.orig_dtype == dtype]
                full = [of_shard.pop(id(param.sharded_param), None) for param in similar]
                dense = [each.to_dense() if each is not None and each.is_sparse else each for each in full]
                scatter_gradients(similar, dense, self._mesh.get_group(-1))

    def explain(self, error: BaseException) -> None:
        """Prepend an explanation to the message of `error`, which a hook raised, if sharding has caused it."""
        if self._units is not None:
            explain(error, partial(explanation, units=self._units))

    def restore(self, obstacle: str | None) -> dict[Parameter, Parameter]:
        """Give the modules back their own parameters, with full values on the CPU. *Collective* unless `obstacle`.

        Args:
            obstacle: the reason why the modules stay sharded; `None` if they do not.

        Returns:
            dict[Parameter, Parameter]: the modules' own parameters by sharded parameter; empty if they stay sharded.
        """
        self.undo.close()
        originals: dict[Parameter, Parameter] = {}
        if obstacle is not None:
            vars(self.root)[LEFT_SHARDED] = obstacle
            return originals
        for snapshot in dict.fromkeys(self._snapshots.values()):
            originals |= snapshot.restore(None)
        return originals


def _parameters_of(parts: Sequence[Module]) -> dict[Parameter, None]:
    return dict.fromkeys(each for part in parts for each in own_parameters(part).values() if each is not None)
