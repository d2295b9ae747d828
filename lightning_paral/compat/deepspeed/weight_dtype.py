"""The dtype that DeepSpeed gives to weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses._set_dtype",
        purpose="to keep the weights' dtype in files on NVMe",
        reason="if the accelerator does not support fp16, as on some CPUs, DeepSpeed ignores the dtype and uses bf16, "
        "for want of a pair of parentheses",
        seen="deepspeed 0.19.8",
        parameters=("self", "ds_config", "dtype"),
    ),
)


@contextmanager
def keep_given_dtype() -> Iterator[None]:
    """Make DeepSpeed keep the dtype that it is given, inside this context."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    choose = Patches._set_dtype

    def set_dtype(self: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        choose(self, ds_config, dtype)
        if dtype is not None:
            self.dtype = dtype

    Patches._set_dtype = set_dtype
    try:
        yield
    finally:
        Patches._set_dtype = choose
