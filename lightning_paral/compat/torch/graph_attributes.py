"""The attributes by which code looks at the place of a tensor in the graph of autograd."""

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.Tensor": {
        "_base": "recognize that FSDP2 asks whether a tensor is a view",
        "_version": "recognize that code asks whether a tensor has been written to",
    },
}

GRAPH_ATTRIBUTES = frozenset({"grad_fn", "output_nr", *NAMES["torch.Tensor"]})
"""Names of attributes that depend on the tensor itself, not on its values."""
