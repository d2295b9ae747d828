"""Functions of torch by name, and those that need no values of a tensor."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_paral.compat.torch.autograd import GRAPH_ATTRIBUTES


def functions(names: str) -> Iterable[Any]:
    """Yield the methods of tensors and the functions of torch with these names, as far as this version has them."""
    for name in names.split():
        for owner in (Tensor, torch):
            found = getattr(owner, name, None)
            if callable(found):
                yield found


def getters(names: str) -> Iterable[Any]:
    """Yield the functions that read these attributes of tensors."""
    for name in names.split():
        yield getattr(Tensor, name).__get__


METADATA = {
    *getters(" ".join(GRAPH_ATTRIBUTES)),
    *getters("shape dtype device ndim requires_grad is_leaf layout itemsize nbytes"),
    *getters("is_cuda is_cpu is_meta is_mps is_xpu is_sparse is_sparse_csr is_quantized is_mkldnn is_nested"),
    *functions("size dim ndimension numel nelement element_size stride storage_offset is_contiguous get_device"),
    *functions("is_floating_point is_complex is_signed is_inference is_conj is_neg __len__ __hash__ __dir__"),
}
"""What is known without the values. Of strides, those of the gathered tensor."""

OF_SHAPE = {
    *functions("zeros_like ones_like empty_like full_like rand_like randn_like"),
    *functions("new_zeros new_ones new_empty new_full new_tensor"),
}
"""Functions that return an ordinary tensor, and depend on the shape, the dtype and the device only."""
