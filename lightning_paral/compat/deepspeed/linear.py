"""`torch.nn.functional.linear`, in the place of which stage 3 puts its own, for good."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_paral.compat.private_name import PrivateName

_KEPT = PrivateName(
    name="deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses.linear_bk",
    purpose="to give torch its own `linear` back after a run",
    reason="that is where DeepSpeed keeps it",
    seen="deepspeed 0.19.8",
    on_instances=True,
)
NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses",
        purpose="to give torch its own `linear` back after a run, which DeepSpeed keeps there as `linear_bk`",
        reason="DeepSpeed says that its function persists unless manually reset",
        seen="deepspeed 0.19.8",
        upstream="https://github.com/deepspeedai/DeepSpeed/issues/7913",
    ),
    _KEPT,
    PrivateName(
        name="deepspeed.runtime.zero.linear.zero3_linear_wrap",
        purpose="to recognize DeepSpeed's `linear`",
        reason="nothing public says whether it is in the place of torch's",
        seen="deepspeed 0.19.8",
    ),
)


@contextmanager
def linear_as_before() -> Iterator[None]:
    """Let `torch.nn.functional.linear` be the same after this context as before it."""
    linear = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def restore_linear() -> None:
    """Give torch its own `linear` back.

    DeepSpeed's yields the gradients of weight and bias in another order: in a later run of stage 1 or 2, ranks with
    that past and ranks without would add up different gradients.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    if torch.nn.functional.linear is zero3_linear_wrap:
        if not hasattr(Patches, "linear_bk"):
            raise _KEPT.error("torch's own is not there")
        torch.nn.functional.linear = Patches.linear_bk
