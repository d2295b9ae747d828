"""Check that ranks that compute a batch together have the same one."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.torch.pytree import tree_leaves
from lightning_paral.distributed.host_exchange import gather_objects
from lightning_paral.errors import ConfigurationError


def check_same_batch(step: str, batch: Any, ranks: str, group: dist.ProcessGroup) -> None:
    """Check that all ranks of `group` have the same batch. *Collective* over `group`.

    Args:
        step: the name of the step that runs on it.
        batch: the batch of this rank.
        ranks: what the ranks are called.
        group: the ranks.

    Raises:
        ConfigurationError: they do not. Raised on all ranks of `group`.
    """
    digest = hashlib.blake2b()
    for tensor in (leaf.detach().cpu() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)):
        digest.update(str((tensor.shape, tensor.dtype)).encode())
        if tensor.layout is torch.strided and tensor.numel():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if len(set(gather_objects(digest.hexdigest(), group))) > 1:
        raise ConfigurationError(
            f"{ranks} have different batches in the first {step}, but they compute it together. Leave out samplers "
            "that divide the samples by rank, such as DistributedSampler: the strategy divides them among the ranks "
            "that draw different samples. Data that is random must be the same on all ranks: call seed_everything() "
            "first, or give it a generator with a seed."
        )
