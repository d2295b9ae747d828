"""The dtype that DeepSpeed gives to weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses": {
        "_set_dtype(ds_config, dtype)": "keep the dtype of weights in files on NVMe",
    },
}


@contextmanager
def keep_given_dtype() -> Iterator[None]:
    """Inside this context, make DeepSpeed use the dtype that it is given."""
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
