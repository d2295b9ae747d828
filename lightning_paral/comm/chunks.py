"""How a flat tensor is cut for the all-reduce algorithms."""

SEGMENT_BYTES = 3 * 1024 * 1024
"""Size a message aims at: adding one overlaps the transfer of the next, and on gloo each costs tenths of a ms."""


def balanced_cuts(start: int, length: int, num_parts: int) -> list[int]:
    """Cut `length` elements from `start` on into `num_parts` runs whose sizes differ by at most one.

    Returns the `num_parts + 1` positions of the cuts: part `i` is `[cuts[i], cuts[i + 1])`, larger parts first.
    """
    size, num_larger = divmod(length, num_parts)
    return [start + i * size + min(i, num_larger) for i in range(num_parts + 1)]


def num_segments(num_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> int:
    """Return into how many messages of about `segment_bytes` a run of `num_bytes` is cut, at least one."""
    return max(1, round(num_bytes / segment_bytes))
