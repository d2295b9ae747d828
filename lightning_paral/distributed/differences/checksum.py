"""Checksums of tensors that depend on every bit, and on no order of summation."""

import torch
from torch import Tensor

_CHUNK = 1 << 20
_ODD = 0x5851F42D4C957F2D  # the multiplier of Knuth's MMIX generator
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the bits and positions of the elements of `tensor`: an int64 of 0 dimensions on its device.

    Equal bits give equal checksums on every device, also of NaN. It needs about 16 MiB of memory on the device.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    size = flat.element_size()
    words = flat.view(_WORDS.get(size, torch.int64))
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    # Sums of int64 wrap around, modulo 2**64, so their order does not matter. Odd factors keep each single difference.
    factors = (2 * torch.arange(min(_CHUNK, words.numel()), dtype=torch.int64, device=tensor.device) + 1) * _ODD
    for number, chunk in enumerate(torch.split(words, _CHUNK)):
        total = total + (chunk.to(torch.int64) * factors[: chunk.numel()]).sum() * (2 * number + 1)
    return total
