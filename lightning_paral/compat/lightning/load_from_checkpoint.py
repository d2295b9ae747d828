"""Let Lightning's `load_from_checkpoint` read folders.

This replaces `pl_load` in `lightning.pytorch.core.saving`, the function with which `_load_from_checkpoint` reads a
path. Lightning's `pl_load` reads only files: it raises `IsADirectoryError` for every sharded checkpoint, even for
Lightning's own. There is no public alternative, because `load_from_checkpoint` takes no `CheckpointIO`. (Lightning
2.6.6, `core/saving.py`.)
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from lightning.pytorch.core import saving

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "lightning.pytorch.core.saving": {
        "pl_load(path_or_url, map_location, weights_only)": "let load_from_checkpoint read folders",
    },
}

_MARK = "_reads_folders"


def install(is_folder: Callable[[Any], bool], read: Callable[..., Mapping[str, Any]]) -> None:
    """Make Lightning's module `core.saving` read folders as well. A second call changes nothing.

    Args:
        is_folder: called with a path or URL; returns whether it is a folder.
        read: called with the path, `map_location` and `weights_only`; returns the checkpoint.

    Raises:
        PrivateNameError: this version of Lightning reads checkpoints in a different way.
    """
    named(NAMES, "pl_load").resolve()
    module: Any = saving
    load = module.pl_load
    if hasattr(load, _MARK):
        return

    @wraps(load)
    def load_any(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if is_folder(path_or_url):
            return read(path_or_url, map_location=map_location, weights_only=weights_only)
        return load(path_or_url, map_location=map_location, weights_only=weights_only)

    setattr(load_any, _MARK, True)
    module.pl_load = load_any
