"""Warnings that libraries give about each other, which users of our runs can do nothing about."""

import warnings
from contextlib import suppress
from typing import Any, NamedTuple


class LibraryWarning(NamedTuple):
    """A warning, by patterns of its message and of the module that it is attributed to."""

    message: str
    category: type[Warning]
    module: str


_ALWAYS_IGNORED = (
    # Lightning 2.6.6 with torch 2.13, for each of its loaders.
    LibraryWarning(r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, r"(pytorch_)?lightning\b"),
    # DeepSpeed 0.19.8 with torch 2.13, while it is imported.
    LibraryWarning(r"`torch\.jit\.script_method` is deprecated", DeprecationWarning, r"torch\.jit\b"),
)

# Lightning gives it because its own loaders cannot resume inside an epoch. Ours can.
RESUMED_INSIDE_EPOCH = LibraryWarning(
    "You're resuming from a checkpoint that ended before the epoch ended", UserWarning, ""
)


class IgnoredWarnings:
    """Ignores library warnings from construction to `end`. Can be copied together with its owner.

    Warning filters are global to the process. Changes that other code makes to them in between are kept.
    """

    def __init__(self) -> None:
        self._added: list[Any] = []
        for warning in _ALWAYS_IGNORED:
            self.add(warning)

    def add(self, warning: LibraryWarning) -> None:
        """Ignore `warning` as well."""
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", warning.message, warning.category, warning.module)
        if warnings.filters[0] not in before:  # otherwise the user has added the same filter, which stays
            self._added.append(warnings.filters[0])

    def end(self) -> None:
        """Remove the filters."""
        for each in self._added:
            with suppress(ValueError):  # the filters may have been reset
                warnings.filters.remove(each)  # type: ignore[attr-defined]
