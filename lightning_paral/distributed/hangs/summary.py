"""What ranks say of where they are, and the sentence that names it for all ranks."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lightning_paral.distributed.hangs.position_sampler import Sample
from lightning_paral.distributed.rank_names import name_ranks

DIFFERENT = (
    "The collectives of the ranks do not match. Every rank must run the same units equally often, and use the same "
    "parameters, whatever its samples are. Run a unit without samples on a dummy input, adding 0 * its output to the "
    "loss, and continue a loop of generation until all ranks are done, as synced_gpus=True does."
)


@dataclass(frozen=True)
class Answer:
    """Where a rank is."""

    what: str
    where: str
    waits_for_ranks: bool
    seconds: float
    """For how long it has been there."""

    @classmethod
    def of(cls, sample: Sample | None) -> "Answer":
        """Return the answer of a rank whose main thread was last seen in `sample`."""
        if sample is None:
            return cls("", "the beginning of the run", waits_for_ranks=False, seconds=0.0)
        position = sample.position
        return cls(position.what, position.where, position.waits_for_ranks, sample.taken - sample.since)

    @classmethod
    def from_text(cls, text: str) -> "Answer":
        """Return the answer that `as_text` wrote."""
        return cls(**json.loads(text))

    def as_text(self) -> str:
        """Return this answer as text for the store."""
        return json.dumps(asdict(self))

    def sentence(self, num_ranks: int, seconds: str = "") -> str:
        """Return what `num_ranks` ranks that answer this are doing, without a subject."""
        one = num_ranks == 1
        seconds = seconds or f"{self.seconds:.0f} s"
        if self.what:
            return f"{'has' if one else 'have'} waited {seconds} {self.what} ({self._plain_where})"
        return f"{'has' if one else 'have'} been in {self.where} for {seconds}"

    @property
    def _plain_where(self) -> str:
        """`where` without parentheses, for use inside parentheses."""
        return self.where.replace(" (", ", ").replace(")", "")


def summarize(answers: Mapping[int, Answer], world_size: int) -> str:
    """Return where all ranks are, in one sentence.

    Ranks that wait for others come after the ranks for which they may wait, and ranks that gave no answer come last.

    Args:
        answers: the answers by rank.
        world_size: the number of ranks.
    """
    groups: dict[tuple[bool, str, str], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        groups.setdefault((answer.waits_for_ranks, answer.what, answer.where), []).append(rank)
    parts = []
    for _, ranks in sorted(groups.items(), key=lambda group: (group[0][0], group[1])):
        times = sorted({round(answers[rank].seconds) for rank in ranks})
        seconds = f"{times[0]} s" if times[0] == times[-1] else f"{times[0]} to {times[-1]} s"
        parts.append(f"{name_ranks(ranks)} {answers[ranks[0]].sentence(len(ranks), seconds)}")
    absent = [rank for rank in range(world_size) if rank not in answers]
    if absent:
        parts.append(f"{name_ranks(absent)} {'has' if len(absent) == 1 else 'have'} not answered")
    text = f"{parts[0][0].upper()}{parts[0][1:]}" + "".join(f"; {part}" for part in parts[1:]) + "."
    are_stuck = all(answer.waits_for_ranks and answer.seconds >= 2.0 for answer in answers.values())
    return f"{text} {DIFFERENT}" if are_stuck and not absent and len(groups) > 1 else text
