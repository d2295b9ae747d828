"""Restore `torch.nn.functional.linear`, which stage 3 replaces permanently."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_paral.compat.private_name import PrivateName

_KEPT = PrivateName(
    name="deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses.linear_bk",
    purpose="to give torch its own `linear` back after a run",
    reason="no public name returns torch's function",
    seen="deepspeed 0.19.8",
    on_instances=True,
)
NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses",
        purpose="to give torch its own `linear` back after a run; DeepSpeed keeps it as `linear_bk`",
        reason="DeepSpeed documents that its function stays until it is reset by hand",
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/7913",
    ),
    _KEPT,
    PrivateName(
        name="deepspeed.runtime.zero.linear.zero3_linear_wrap",
        purpose="to recognize DeepSpeed's `linear`",
        reason="no public name says whether it has replaced torch's",
        seen="deepspeed 0.19.8",
    ),
)


@contextmanager
def preserve_linear() -> Iterator[None]:
    """Restore `torch.nn.functional.linear` at the end of this context."""
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def restore_linear() -> None:
    """Give torch its own `linear` back.

    DeepSpeed's produces the gradients of weight and bias in another order: in a later run of stage 1 or 2, ranks that
    have run stage 3 and ranks that have not would add up gradients of different parameters.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    if torch.nn.functional.linear is zero3_linear_wrap:
        if not hasattr(Patches, "linear_bk"):
            raise _KEPT.error("torch's own is not there")
        torch.nn.functional.linear = Patches.linear_bk
