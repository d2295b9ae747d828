"""Check that all ranks have the same settings, parameters and optimizers, and name the first difference."""

import hashlib
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch.distributed as dist

from lightning_paral.distributed.host_exchange import gather_ints, gather_objects
from lightning_paral.distributed.process_group import host_group
from lightning_paral.distributed.rank_names import name_ranks
from lightning_paral.errors import ConfigurationError

Facts = Mapping[tuple[str, str], str]
"""What must be equal: a value for each subject and verb, such as ``("`head.weight`", "has shape"): "(10, 8)"``."""

_MANY = 8
_LONG = 200


def check_same(facts: Facts, remedy: str, group: dist.ProcessGroup | None = None) -> None:
    """Check that the ranks of `group` have equal facts, in the same order. *Collective* over `group`.

    Only a digest is exchanged, unless they differ.

    Args:
        facts: the facts of this rank.
        remedy: what the user can do if they differ; ends the message.
        group: the ranks that must agree; `None` for all ranks.

    Raises:
        ConfigurationError: the facts differ. The message names the first difference and the ranks. It is raised on all
            ranks of `group`.
    """
    group = group or host_group()
    if len(set(gather_ints(digest_of(list(facts.items())), group))) == 1:
        return
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    by_rank = dict(zip(ranks, gather_objects(dict(facts), group), strict=True))
    raise ConfigurationError(f"{first_difference(by_rank)}. {remedy}")


def digest_of(value: Any) -> int:
    """Return a 64-bit digest of the `repr` of `value`, equal in all processes that have an equal `value`."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def first_difference(by_rank: Mapping[int, Facts]) -> str:
    """Return a clause that names the first difference, such as `max_epochs is 2 on rank 0 and 4 on rank 1`."""
    subjects_by_rank = {rank: {subject for subject, _ in facts} for rank, facts in by_rank.items()}
    for subject, verb in dict.fromkeys(chain.from_iterable(by_rank.values())):
        having = [rank for rank, subjects in subjects_by_rank.items() if subject in subjects]
        if len(having) < len(by_rank):
            return f"{subject} exists on {name_ranks(having)} only"
        values = {rank: facts.get((subject, verb), "not set") for rank, facts in by_rank.items()}
        if len(set(values.values())) > 1:
            return f"{subject} {verb} {values_by_rank(values)}"
    order_by_rank = {rank: list(facts) for rank, facts in by_rank.items()}
    position = next(index for index, each in enumerate(zip(*order_by_rank.values(), strict=True)) if len(set(each)) > 1)
    firsts = {rank: order[position][0] for rank, order in order_by_rank.items()}
    return f"The order differs: the first one that differs is {values_by_rank(firsts)}"


def values_by_rank(values: Mapping[int, str]) -> str:
    """Return the values with the ranks that have them, such as `2 on ranks 0, 2 and 4 on rank 1`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    found = [f"{_shorten(value)} on {name_ranks(having)}" for value, having in list(ranks.items())[:_MANY]]
    found += ["..."] * (len(ranks) > _MANY)
    return f"{', '.join(found[:-1])} and {found[-1]}" if len(found) > 1 else found[0]


def _shorten(value: str) -> str:
    return value if len(value) <= _LONG else f"{value[:_LONG]}..."
