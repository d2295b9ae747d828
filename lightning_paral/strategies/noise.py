"""Warnings of one library about another, which users of our runs can do nothing about."""

import warnings
from contextlib import suppress
from typing import Any, NamedTuple


class Noise(NamedTuple):
    """A warning, by what it says and by the module that it is about."""

    message: str
    category: type[Warning]
    module: str


NOISE = (
    # Lightning 2.6.6 with torch 2.13, for each of its loaders.
    Noise(r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, r"(pytorch_)?lightning\b"),
    # DeepSpeed 0.19.8 with torch 2.13, while it is imported.
    Noise(r"`torch\.jit\.script_method` is deprecated", DeprecationWarning, r"torch\.jit\b"),
)

# Lightning warns because its loaders cannot resume inside an epoch. Ours can.
RESUMED_INSIDE_EPOCH = Noise("You're resuming from a checkpoint that ended before the epoch ended", UserWarning, "")


class NoiseLeftOut:
    """Suppresses the warnings of `NOISE`, and others added to it, until `end`. It can be copied with its owner.

    Warning filters are global. Changes that other code makes to them in the meantime are kept.
    """

    def __init__(self) -> None:
        self._added: list[Any] = []
        for noise in NOISE:
            self.leave_out(noise)

    def leave_out(self, noise: Noise) -> None:
        """Suppress another warning as well."""
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", noise.message, noise.category, noise.module)
        if warnings.filters[0] not in before:  # else the user has added the same filter, which stays
            self._added.append(warnings.filters[0])

    def end(self) -> None:
        """Let the warnings through again."""
        for each in self._added:
            with suppress(ValueError):  # somebody has reset the filters
                warnings.filters.remove(each)  # type: ignore[attr-defined]
