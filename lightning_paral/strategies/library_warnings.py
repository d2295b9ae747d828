"""Ignore warnings that libraries cause in each other, and that users can do nothing about."""

import warnings
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple


class LibraryWarning(NamedTuple):
    """A warning, identified by patterns of its message and of the module to which it is attributed."""

    message: str
    category: type[Warning]
    module: str


_ALWAYS_IGNORED = (
    # Lightning 2.6.6 with torch 2.13: once for each loader.
    LibraryWarning(r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, r"(pytorch_)?lightning\b"),
    # DeepSpeed 0.19.8 with torch 2.13: when it is imported.
    LibraryWarning(r"`torch\.jit\.script_method` is deprecated", DeprecationWarning, r"torch\.jit\b"),
)

# Lightning warns because its own loaders cannot resume inside an epoch. Ours can.
RESUMED_INSIDE_EPOCH = LibraryWarning(
    "You're resuming from a checkpoint that ended before the epoch ended", UserWarning, ""
)


def ignore(undo: ExitStack, *library_warnings: LibraryWarning) -> None:
    """Ignore library warnings until `undo` is closed; without any given, those that no user can do anything about.

    Warning filters are global to the process. Changes that other code makes to them in the meantime are kept.
    """
    for warning in library_warnings or _ALWAYS_IGNORED:
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", warning.message, warning.category, warning.module)
        if warnings.filters[0] not in before:  # otherwise the user added the same filter, which has to be kept
            undo.callback(_remove, warnings.filters[0])


def _remove(added: Any) -> None:
    with suppress(ValueError):  # the filters may have been reset
        warnings.filters.remove(added)  # type: ignore[attr-defined]
