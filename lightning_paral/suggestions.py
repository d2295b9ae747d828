"""Suggest known names for a misspelt one."""

import difflib
from collections.abc import Collection, Sequence


def nearest_names(name: str, known: Collection[str], most: int = 3, cutoff: float = 0.7) -> list[str]:
    """Return up to `most` of the `known` names that resemble `name`, the most similar first.

    Args:
        name: the name that the user wrote.
        known: the names to choose from.
        most: the largest number of names to return.
        cutoff: the smallest similarity, from 0 to 1, as in `difflib.SequenceMatcher.ratio`.
    """
    return difflib.get_close_matches(name, sorted(known), n=most, cutoff=cutoff)


def did_you_mean(names: Sequence[str], *, quoted: bool = False) -> str:
    """Return the question "Did you mean ...?" with `names`; an empty string if there are none."""
    shown = map(repr, names) if quoted else names
    return f"Did you mean {' or '.join(shown)}?" if names else ""
