"""Reject embeddings whose weights would differ between ranks, or whose gradients cannot be reduced."""

from torch.nn import Embedding, EmbeddingBag, Module

from lightning_paral.errors import ConfigurationError


def check_embeddings(module: Module, num_ranks: int, cannot_reduce_sparse: str = "") -> None:
    """Check the embeddings in `module` that are to be trained.

    Args:
        module: the user's module.
        num_ranks: number of ranks that train it, or of replicas in one process.
        cannot_reduce_sparse: the user's name for the strategies that cannot reduce sparse gradients; empty if this one
            can.

    Raises:
        ConfigurationError: an embedding would differ between ranks, or its gradient cannot be reduced.
    """
    for name, part in module.named_modules():
        if not isinstance(part, Embedding | EmbeddingBag):
            continue
        where = f"{name or type(module).__name__} is {type(part).__name__}"
        if part.max_norm is not None and num_ranks > 1:
            raise ConfigurationError(
                f"{where}(max_norm={part.max_norm}), which changes its weight in forward, in the rows that the batch "
                "looks up. Each rank would change those of its own samples. Leave max_norm out and scale what is "
                "looked up, or the weight in on_train_batch_start: module.weight.data = torch.renorm(module.weight."
                f"data, {part.norm_type}, 0, {part.max_norm})."
            )
        if part.sparse and cannot_reduce_sparse and part.weight.requires_grad:
            raise ConfigurationError(
                f"{where}(sparse=True), and {cannot_reduce_sparse} cannot reduce sparse gradients. Make it with "
                "sparse=False, or train with paral_ddp."
            )
