"""Tensors are grouped by dtype and device, in the given order."""

import torch

from lightning_paral.comm.grouping import group_by_dtype_and_device


def test_groups_and_their_members_keep_the_order() -> None:
    tensors = [
        torch.zeros(1),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(3),
        torch.zeros(4, device="meta"),
        torch.zeros(5, dtype=torch.bfloat16),
    ]

    groups = group_by_dtype_and_device(tensors)

    assert [[tensor.numel() for tensor in group] for group in groups] == [[1, 3], [2, 5], [4]]
