"""Ignore warnings that libraries cause in each other, and that users can do nothing about."""

import logging
import warnings
from contextlib import suppress
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


def ignore_sequential_gathers() -> None:
    """Ignore torch's advice, logged at the first gather of a parameter that FSDP and tensor ranks share, to use one.

    torch (2.13) cannot gather such parameters in one operation. The advice also says that results may differ between
    ranks, which is not true of gathers.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("While redistributing from")


class IgnoredWarnings:
    """Ignores library warnings from construction to `end`. Can be copied together with its owner.

    Warning filters are global to the process. Changes that other code makes to them in the meantime are kept.
    """

    def __init__(self) -> None:
        self._added: list[Any] = []
        for warning in _ALWAYS_IGNORED:
            self.add(warning)

    def add(self, warning: LibraryWarning) -> None:
        """Add a warning to ignore."""
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", warning.message, warning.category, warning.module)
        if warnings.filters[0] not in before:  # otherwise the user added the same filter, and `end` must keep it
            self._added.append(warnings.filters[0])

    def end(self) -> None:
        """Remove the filters."""
        for each in self._added:
            with suppress(ValueError):  # the filters may have been reset
                warnings.filters.remove(each)  # type: ignore[attr-defined]
