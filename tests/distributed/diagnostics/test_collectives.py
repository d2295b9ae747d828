"""The checks of the values that collectives deliver."""

import pytest
import torch
import torch.distributed as dist

from lightning_paral.diagnostics.doctor.collectives import COLLECTIVES, WITHOUT_DATA, Ranks

NUMEL = 12  # divisible by the world sizes


def this_rank() -> Ranks:
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"))


def checks_before_and_after() -> dict[str, tuple[bool, bool]]:
    found = {}
    for name, prepare in COLLECTIVES.items():
        run, is_right = prepare(this_rank(), NUMEL)
        before = is_right()
        run()
        found[name] = before, is_right()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_checks_pass_after_a_collective_and_fail_without_it(on_ranks, world_size: int) -> None:
    ranks = on_ranks(world_size, checks_before_and_after)

    for name in COLLECTIVES:
        assert all(rank[name][1] for rank in ranks), name
        assert name in WITHOUT_DATA or not all(rank[name][0] for rank in ranks), name
