"""Check before the first step of each kind that splitting layers changes neither its results nor its gradients."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.layout import chunk_of_dtensor
from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.compat.torch.modules import own_parameters, show_parameters, without_fsdp_loading
from lightning_paral.compat.torch.tensors import tree_leaves
from lightning_paral.data.parts import first_samples
from lightning_paral.data.rollback import rollback_side_effects
from lightning_paral.distributed.exchange import any_rank, gather_int_lists, gather_objects
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.rng_state import global_states
from lightning_paral.engines.tensor.layers import TensorSplit
from lightning_paral.errors import ConfigurationError, ParalError
from lightning_paral.model.gradients import full_copy, local_part

_TOLERANCE = 1e-4
_TOLERANCE_OF_16_BITS = 5e-2
_CANCELLED = 0.05
"""Gradients smaller than this part of the largest one are compared with this part of it. Gradients before a BatchNorm,
for example, are what rounding leaves of larger numbers, which cancel."""

Step = Callable[[Any], Any]
"""Runs a step on a batch. Returns the loss, after its backward pass; or what an evaluation returns and logs."""


def check_split(
    module: LightningModule, batch: Any, step: Step, split: TensorSplit, dims: ParallelDims, what: str
) -> None:
    """Compare a step on two samples with that of the unsplit module, without side effects. *Collective* over the world.

    For the unsplit module, each rank gathers all parameters. Gradients of both steps are averages over the data ranks.
    If steps draw random numbers, as for dropout, they are compared in evaluation mode. If they draw there as well, they
    are not compared.

    Args:
        module: the LightningModule, whose parameters are split and sharded.
        batch: the first batch of this rank.
        step: runs a step.
        split: the layers that are split.
        dims: the arrangement of the ranks.
        what: the name of the step. Before a `"training_step"`, parameters must have no gradients, and these are
            compared too.

    Raises:
        ConfigurationError: the result or a gradient differs. Raised on all ranks.
    """
    two = _two_samples(batch)
    trained = [part for part in module.modules() if part.training]
    try:
        draws = any_rank(_split_step(module, two, step, what)[2])
    except Exception as error:
        if not isinstance(error, ParalError):
            error.add_note(f"To check the plan, {what} ran on two samples. If it needs more, set check_plan=False.")
        raise
    if split.may_draw or draws:
        module.eval()
    split.begin_step()  # which splits the layers as the first pass has shown
    try:
        found = _difference(module, two, step, split, dims, what)
    finally:
        for part in trained:
            part.training = True
    faults = [fault for fault in gather_objects(found) if fault]
    if faults:
        raise ConfigurationError(
            f"Splitting the layers of {type(module).__name__} changes its {what}. On two samples of the first "
            f"batch, {faults[0]}. Give a plan without the layers whose code depends on their sizes: "
            "plan={...} with patterns of names, such as {'blocks.*.up': 'colwise'}. `paral plan --tensor-parallel` "
            "prints the current plan. If the difference is intended, for example because the step is random, set "
            "check_plan=False."
        )


def _split_step(
    module: LightningModule, batch: Any, step: Step, what: str
) -> tuple[list[Tensor], dict[str, Tensor | None], bool]:
    """Return the results of a step, its gradients, and whether it has drawn random numbers that all ranks share."""
    before = global_states()[0]
    with rollback_side_effects(module), _weights_kept(module):
        results = _numbers_of(step(batch))
        draws = not torch.equal(before, global_states()[0])
    return results, _taken_gradients(module, what), draws


def _difference(
    module: LightningModule, batch: Any, step: Step, split: TensorSplit, dims: ParallelDims, what: str
) -> str:
    """Return what differs between the split and the unsplit module; empty if nothing, or if numbers are drawn."""
    results, gradients, draws = _split_step(module, batch, step, what)
    if any_rank(draws):
        return ""
    with rollback_side_effects(module), _unsplit(module, split) as full:
        expected = _numbers_of(step(batch))
    _taken_gradients(module, what)
    tolerance = _TOLERANCE_OF_16_BITS if "16" in str(module.trainer.precision) else _TOLERANCE
    # Collective, so before ranks return. An evaluation leaves no gradients.
    different = _different_gradient(gradients, full, dims, tolerance) if what == "training_step" else ""
    named = "the loss" if what == "training_step" else "what it returns or logs"
    if [each.shape for each in results] != [each.shape for each in expected]:
        return f"{named} has another shape"
    for found, other in zip(results, expected, strict=True):
        difference = _largest((found - other).masked_fill(found.isnan() & other.isnan(), 0.0))
        if not difference <= tolerance * max(1.0, _largest(other.nan_to_num())):
            return f"{named} differs by {difference:.2g}"
    return different


def _different_gradient(
    gradients: dict[str, Tensor | None], full: dict[str, Tensor], dims: ParallelDims, tolerance: float
) -> str:
    """Return the name of the gradient with the largest difference, with this difference; empty if none differs."""
    # Some modules, such as LSTMs, keep references to their own parameters, and do not compute with the gathered ones.
    has_gradient = gather_int_lists([int(parameter.grad is not None) for parameter in full.values()])
    expected = {}
    for (name, parameter), *ranks in zip(full.items(), *has_gradient, strict=True):
        if any(ranks) and not isinstance(parameter, FlatShard):  # of another stage of a pipeline
            expected[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if dims.data_size > 1:
                dist.all_reduce(expected[name], group=dims.data_group())
                expected[name] /= dims.data_size
    sizes = {name: _largest(each) for name, each in expected.items()}
    smallest_scale = max(1e-6, _CANCELLED * max(sizes.values(), default=0.0))
    worst, text = tolerance, ""
    for name, whole in expected.items():
        gradient = gradients.get(name)
        if isinstance(gradient, DTensor):
            chunk = chunk_of_dtensor(gradient)
            assert chunk is not None
            whole, gradient = whole[chunk.index], gradient.to_local()
        difference = _largest(whole if gradient is None else gradient.to(whole) - whole)
        difference /= max(sizes[name], smallest_scale)
        if difference > worst or difference != difference:
            worst, text = difference, f"the gradient of {name} differs by {difference:.2g} of its largest element"
    return text


@contextmanager
def _unsplit(module: Module, split: TensorSplit) -> Iterator[dict[str, Tensor]]:
    """Let layers compute with full parameters inside the block; yield these by name. *Collective* over the world."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    full = {
        each: each if isinstance(each, FlatShard) else Parameter(full_copy(each), each.requires_grad) for each in names
    }
    split.is_paused = True
    try:
        with ExitStack() as stack:
            for part in module.modules():
                own = own_parameters(part)
                if any(isinstance(each, FlatShard) for each in own.values()):  # of another stage of a pipeline
                    continue
                shown = {name: each if each is None else full[each] for name, each in own.items()}
                stack.enter_context(show_parameters(part, shown))
                stack.enter_context(without_fsdp_loading(part))
            yield {name: full[each] for each, name in names.items()}
    finally:
        split.is_paused = False


@contextmanager
def _weights_kept(module: Module) -> Iterator[None]:
    """Undo what steps inside the block write to this rank's part of the parameters."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # with reshard_after_forward=False, an evaluation leaves parameters unsharded
    local = [local_part(each.detach()) for each in module.parameters() if not isinstance(each, FlatShard)]
    before = [each.clone() for each in local]
    try:
        yield
    finally:
        for each, value in zip(local, before, strict=True):
            if not torch.equal(each, value):
                each.copy_(value)


def _two_samples(batch: Any) -> Any:
    with suppress(ConfigurationError):  # it cannot be divided
        return first_samples(batch, 0, 2)
    return batch


def _numbers_of(output: Any) -> list[Tensor]:
    leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    return [each.detach() for each in leaves if each.is_floating_point()]


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _taken_gradients(module: Module, what: str) -> dict[str, Tensor | None]:
    """Return the gradients that a training step has left, by name, and remove them. Evaluations leave none."""
    gradients: dict[str, Tensor | None] = {}
    if what == "training_step":
        for name, parameter in module.named_parameters():
            gradients[name], parameter.grad = parameter.grad, None
    return gradients
