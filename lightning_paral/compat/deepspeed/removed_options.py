"""Options that DeepSpeed has removed and now rejects, read from its source without importing it."""

import ast
from collections.abc import Iterator

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.runtime.config": {
        "_REMOVED_TOP_LEVEL_CONFIG_KEYS": "distinguish removed options from valid and from misspelled ones",
    },
}


def removed_options(tree: ast.Module) -> Iterator[str]:
    """Yield the options that a source file of DeepSpeed lists as removed."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if any(isinstance(target, ast.Name) and target.id.startswith("_REMOVED_") for target in node.targets):
            yield from (str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
