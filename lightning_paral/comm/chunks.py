"""Divide a flat tensor into one chunk per rank, and chunks into segments, for the all-reduce algorithms."""

SEGMENT_BYTES = 3 * 1024 * 1024
"""Target size of a message. Small messages overlap addition with transfer, but each costs tenths of a ms on gloo."""


def balanced_cuts(start: int, length: int, num_parts: int) -> list[int]:
    """Divide the `length` elements that begin at `start` into `num_parts` ranges whose sizes differ by at most one.

    Returns:
        The list `cuts` of `num_parts + 1` bounds: part `i` is `[cuts[i], cuts[i + 1])`. Larger parts come first.
    """
    size, num_larger = divmod(length, num_parts)
    return [start + i * size + min(i, num_larger) for i in range(num_parts + 1)]


def num_segments(num_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> int:
    """Return the number of messages of about `segment_bytes` for `num_bytes`, at least one."""
    return max(1, round(num_bytes / segment_bytes))
