"""Refuse modules and optimizers that several ranks cannot train, and explain torch's errors about sharded tensors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch.nn import Embedding, EmbeddingBag, Module
from torch.optim import Optimizer

from lightning_paral.compat.torch.modules import BatchNorm
from lightning_paral.errors import ConfigurationError, ParalError


def check_embeddings(module: Module, num_ranks: int, dense_only_engine: str = "") -> None:
    """Check that the embeddings in `module` can be trained on several ranks.

    Args:
        module: the user's module.
        num_ranks: the number of ranks that train `module`, or of replicas in one process.
        dense_only_engine: the engine's name, such as `"FSDP"`, if it cannot reduce sparse gradients; empty if it can.

    Raises:
        ConfigurationError: the weight of an embedding would differ between ranks, or its gradient cannot be reduced.
    """
    for name, part in module.named_modules():
        if not isinstance(part, Embedding | EmbeddingBag):
            continue
        where = f"{name or type(module).__name__} is {type(part).__name__}"
        if part.max_norm is not None and num_ranks > 1:
            raise ConfigurationError(
                f"{where}(max_norm={part.max_norm}), which renormalizes the rows of its weight that a batch looks up. "
                "Each rank would renormalize different rows, so the weights would differ between ranks. Remove "
                "max_norm, and either scale the output of the embedding, or renormalize the weight in "
                "on_train_batch_start: module.weight.data = torch.renorm(module.weight.data, "
                f"{part.norm_type}, 0, {part.max_norm})."
            )
        if part.sparse and dense_only_engine and part.weight.requires_grad:
            raise ConfigurationError(
                f"{where}(sparse=True), and {dense_only_engine} cannot reduce sparse gradients. Set sparse=False, or "
                "train with paral_ddp."
            )


def check_optimizer_parameters(optimizers: Iterable[Optimizer], module: Module) -> None:
    """Check that the optimizers hold only parameters of `module`.

    Each rank would update any other tensor, such as a buffer that requires a gradient, with its local gradient.

    Raises:
        ConfigurationError: an optimizer holds another tensor that requires a gradient.
    """
    averaged = set(module.parameters())
    buffers = {buffer: name for name, buffer in module.named_buffers()}
    for optimizer in optimizers:
        for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            if tensor.requires_grad and tensor not in averaged:
                what = f"a {type(tensor).__name__} of shape {list(tensor.shape)} that is not a parameter of"
                what = f"the buffer {buffers[tensor]}" if tensor in buffers else f"{what} {type(module).__name__}"
                raise ConfigurationError(
                    f"{type(optimizer).__name__} trains {what}. Register it as an nn.Parameter, or the module that "
                    "holds it, there (as an attribute or in an nn.ModuleList, not in a list). Only gradients of "
                    "registered parameters are averaged over the ranks, so each rank would compute a different value."
                )


def check_sync_batchnorm(module: Module, layer_sync: LayerSync | None, device: torch.device) -> None:
    """Raise a `ConfigurationError` if `layer_sync` would synchronize BatchNorm on CPU, which torch does not support."""
    is_refused = isinstance(layer_sync, TorchSyncBatchNorm) and device.type == "cpu"
    if is_refused and any(isinstance(part, BatchNorm) for part in module.modules()):
        raise ConfigurationError(
            "Trainer(sync_batchnorm=True) needs CUDA: torch's SyncBatchNorm does not support CPU tensors. Remove the "
            "argument."
        )


def sync_batchnorm(module: Module, layer_sync: LayerSync | None, device: torch.device) -> None:
    """Replace the BatchNorm layers of `module` with SyncBatchNorm, unless `layer_sync` is `None`.

    Raises:
        ConfigurationError: torch does not support SyncBatchNorm on `device`.
    """
    check_sync_batchnorm(module, layer_sync, device)
    if layer_sync is not None:
        layer_sync.apply(module)


Explanation = Callable[[BaseException], str | None]
"""Takes an error; returns its explanation, or `None` if the error has another cause."""

_EXPLAINED = (RuntimeError, AssertionError, AttributeError)


@contextmanager
def explain_errors(explanation: Explanation) -> Iterator[None]:
    """Replace those errors raised in the block that `explanation` explains.

    Raises:
        ConfigurationError: the explanation; the original error is its `__cause__`.
    """
    try:
        yield
    except _EXPLAINED as error:
        meaning = _meaning(error, explanation)
        if meaning is None:
            raise
        raise ConfigurationError(meaning) from error


def explain(error: BaseException, explanation: Explanation) -> None:
    """Prepend the explanation of `error`, if there is one, to its message, in place."""
    meaning = _meaning(error, explanation)
    if meaning is not None:
        error.args = (meaning,)


def _meaning(error: BaseException, explanation: Explanation) -> str | None:
    if not isinstance(error, _EXPLAINED) or isinstance(error, ParalError):
        return None
    meaning = explanation(error)
    return None if meaning is None else f"{meaning}\ntorch: {error}"
