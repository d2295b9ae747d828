"""An average that travels as 8-bit integers, with a scale for each block, and whose rounding error is carried over."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.point_to_point import exchange, wait
from lightning_paral.comm.reduction import plan_reduction

BLOCK = 512
"""Elements that share a scale. It is an fp32 number, so a message has 1 + 4 / 512 bytes per element."""
_LARGEST = 127
_SCALE_BYTES = 4


def int8_average(tensor: Tensor, error: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Replace `tensor` by its average over `group`, bit-identical on all ranks. *Collective* over `group`.

    Each rank rounds `tensor + error` and keeps what rounding has removed in `error`, so that it is sent the next time:
    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014. Each rank adds up a chunk, rounds the average,
    and keeps the error of that as well.

    Cost: each rank sends 2(N-1) chunks of ceil(length / N) elements, rounded up to blocks.
    Memory: about three copies of the tensor.

    Args:
        tensor: a contiguous floating-point tensor. It is averaged in place.
        error: a tensor like it, zero at first, which belongs to this rank. It is updated in place.
        group: the ranks that take part; `None` for the default group.

    Returns:
        `tensor`.
    """
    reduction = plan_reduction(tensor, group, dist.ReduceOp.AVG, None)
    flat, rank, world_size = reduction.flat, reduction.rank, reduction.world_size
    if world_size == 1 or not flat.numel():
        return tensor
    peers = [peer for peer in range(world_size) if peer != rank]
    num_padding = -flat.numel() % (world_size * BLOCK)
    wanted = torch.nn.functional.pad(flat + error.view(-1), (0, num_padding)).view(world_size, -1, BLOCK)
    messages = _rounded(wanted)
    left = wanted - _values(messages, flat.dtype)
    received = torch.empty_like(messages)
    received[rank] = messages[rank]
    receives = [(received[peer], peer) for peer in peers]
    wait(*exchange([(messages[peer], peer) for peer in peers], receives, reduction.group))
    average = _values(received, flat.dtype).mean(dim=0)
    received[rank] = _rounded(average)
    left[rank].add_(average.sub_(_values(received[rank], flat.dtype)), alpha=world_size)
    wait(*exchange([(received[rank], peer) for peer in peers], receives, reduction.group))
    flat.copy_(_values(received, flat.dtype).view(-1)[: flat.numel()])
    error.view(-1).copy_(left.view(-1)[: flat.numel()])
    return tensor


def _rounded(values: Tensor) -> Tensor:
    """Return the bytes of `values`, shape `[..., blocks, BLOCK]`, each block with its scale in front."""
    scales = values.abs().amax(dim=-1, keepdim=True).div(_LARGEST).to(torch.float32)
    rounded = values.div(scales.where(scales != 0, 1)).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), rounded.view(torch.uint8)], dim=-1)


def _values(message: Tensor, dtype: torch.dtype) -> Tensor:
    scales = message[..., :_SCALE_BYTES].contiguous().view(torch.float32)
    return message[..., _SCALE_BYTES:].view(torch.int8).to(dtype) * scales.to(dtype)
