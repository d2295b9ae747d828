"""Functions on nested containers, with the same node types as torch and Lightning."""

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from lightning_paral.compat.private_name import PrivateName

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

_REASON = "torch has no public pytree module, and Lightning's CombinedLoader uses this private one"

NAMES = (
    PrivateName(
        name="torch.utils._pytree.tree_flatten",
        purpose="to find the tensors among the arguments of an operation",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        parameters=("tree",),
    ),
    PrivateName(
        name="torch.utils._pytree.tree_leaves",
        purpose="to find the tensors in a state",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        parameters=("tree",),
    ),
    PrivateName(
        name="torch.utils._pytree.tree_map",
        purpose="to replace the tensors among the arguments of an operation",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        parameters=("func", "tree"),
    ),
    PrivateName(
        name="torch.utils._pytree.tree_map_only",
        purpose="to replace the tensors in a checkpoint",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        parameters=("type_or_types_or_pred", "func", "tree"),
    ),
    PrivateName(
        name="torch.utils._pytree.tree_unflatten",
        purpose="to rebuild a batch in the structure of Lightning's CombinedLoader",
        reason=_REASON,
        seen="torch 2.11 to 2.13",
        parameters=("leaves", "treespec"),
    ),
)
