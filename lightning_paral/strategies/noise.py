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

# Lightning's for loaders that cannot go on where they were. Ours do.
RESUMED_INSIDE_EPOCH = Noise("You're resuming from a checkpoint that ended before the epoch ended", UserWarning, "")


class NoiseLeftOut:
    """Leaves out the warnings of `NOISE`, and others that are named, until `end`. It can be copied with what holds it.

    The filters are the process's. What others add to them, or reset, in the meantime stays so.
    """

    def __init__(self) -> None:
        self._added: list[Any] = []
        for noise in NOISE:
            self.leave_out(noise)

    def leave_out(self, noise: Noise) -> None:
        """Leave out another warning, too."""
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", noise.message, noise.category, noise.module)
        if warnings.filters[0] not in before:  # else it is the user's own, and stays
            self._added.append(warnings.filters[0])

    def end(self) -> None:
        """Let the warnings through again."""
        for each in self._added:
            with suppress(ValueError):  # somebody has reset the filters
                warnings.filters.remove(each)  # type: ignore[attr-defined]
