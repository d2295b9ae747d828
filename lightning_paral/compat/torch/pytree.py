"""Functions on nested containers, with the same node types as torch and Lightning."""

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from lightning_paral.compat.private_name import Names

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]


NAMES: Names = {
    "torch.utils._pytree": {
        "tree_flatten(tree)": "find the tensors among the arguments of an operation",
        "tree_leaves(tree)": "find the tensors in a state",
        "tree_map(func, tree)": "replace the tensors among the arguments of an operation",
        "tree_map_only(type_or_types_or_pred, func, tree)": "replace the tensors in a checkpoint",
        "tree_unflatten(leaves, treespec)": "rebuild a batch in the structure of Lightning's CombinedLoader",
    },
}
