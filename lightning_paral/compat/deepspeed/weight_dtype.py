"""The dtype that DeepSpeed takes for that of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses._set_dtype",
        purpose="to keep the weights' dtype in files on NVMe",
        reason="where the accelerator has no fp16, as some CPUs have not, DeepSpeed takes bf16 instead, by a missing "
        "pair of parentheses",
        seen="deepspeed 0.19.8",
        parameters=("self", "ds_config", "dtype"),
    ),
)


@contextmanager
def dtype_as_given() -> Iterator[None]:
    """Let DeepSpeed keep a dtype that it is given while this context lasts."""
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
