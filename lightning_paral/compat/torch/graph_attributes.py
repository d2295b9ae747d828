"""The attributes by which code looks at the place of a tensor in the graph of autograd."""

from lightning_paral.compat.private_name import PrivateName

_BASE = PrivateName(
    name="torch.Tensor._base",
    purpose="to recognize that FSDP2 asks whether a tensor is a view",
    reason="FSDP2 reads the private attribute",
    seen="torch 2.11 to 2.13",
)
_VERSION = PrivateName(
    name="torch.Tensor._version",
    purpose="to recognize that code asks whether a tensor has been written to",
    reason="the public torch.autograd.graph.increment_version increments the counter, but no public name reads it",
    seen="torch 2.11 to 2.13",
)
NAMES = (_BASE, _VERSION)

GRAPH_ATTRIBUTES = frozenset({"grad_fn", "output_nr", *(each.name.rpartition(".")[2] for each in NAMES)})
"""Names of attributes that depend on the tensor itself, not on its values."""
