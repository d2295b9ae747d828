"""Restore `torch.nn.functional.linear`, which stage 3 replaces permanently."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "deepspeed.runtime.zero.partition_parameters": {
        "InsertPostInitMethodToModuleSubClasses": "restore torch's `linear` after a run (deepspeed#7913)",
    },
    "deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses": {
        ".linear_bk": "restore torch's own `linear` after a run",
    },
    "deepspeed.runtime.zero.linear": {"zero3_linear_wrap": "recognize DeepSpeed's `linear`"},
}


@contextmanager
def preserve_linear() -> Iterator[None]:
    """Restore `torch.nn.functional.linear` at the end of this context."""
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def restore_linear() -> None:
    """Restore torch's own `torch.nn.functional.linear` if DeepSpeed has replaced it.

    DeepSpeed's function produces the gradients of weight and bias in a different order. In a later run of stage 1 or 2,
    ranks that have run stage 3 and ranks that have not would sum gradients of different parameters.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    if torch.nn.functional.linear is zero3_linear_wrap:
        if not hasattr(Patches, "linear_bk"):
            raise named(NAMES, "linear_bk").error("there is no such attribute")
        torch.nn.functional.linear = Patches.linear_bk
