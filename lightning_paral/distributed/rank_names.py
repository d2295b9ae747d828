"""Name ranks in messages."""

from collections.abc import Iterable

_MANY = 8


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 1`, or `ranks 0, 2 to 5`; of many separate ranks, the first ones. `ranks` are in ascending order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    count = sum(map(len, runs))
    more = f", ... ({count} ranks)" if len(texts) > _MANY else ""
    return f"rank{'s' * (count != 1)} {', '.join(texts[:_MANY])}{more}"
