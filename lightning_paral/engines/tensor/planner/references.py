"""Find tensors to which objects of Python still refer."""

import gc
import sys
from typing import Any

from torch import Tensor


def referred(tensors: list[Tensor]) -> list[Tensor]:
    """Return those of `tensors` to which other objects of Python refer, such as attributes, lists and closures.

    An autograd graph that saved a tensor does not count. The list is emptied.
    """
    unique: list[Any] = list({id(tensor): tensor for tensor in tensors}.values())
    tensors.clear()
    unique.append(object())  # nothing else refers to it
    counts = [sys.getrefcount(tensor) for tensor in unique]
    suspects = [tensor for tensor, count in zip(unique, counts, strict=True) if count > counts[-1]]
    if not suspects:
        return []
    own = {id(unique), id(suspects), id(sys._getframe())}
    found: set[int] = set()
    for holder in gc.get_referrers(*suspects):
        if id(holder) not in own:
            found |= {id(each) for each in gc.get_referents(holder)}
    return [suspect for suspect in suspects if id(suspect) in found]
