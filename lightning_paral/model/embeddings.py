"""Reject embeddings whose weights would differ between ranks, or whose gradients cannot be reduced."""

from torch.nn import Embedding, EmbeddingBag, Module

from lightning_paral.errors import ConfigurationError


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
