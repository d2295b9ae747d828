"""Functions of `torch.distributed` that would count samples several times are refused, and others run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather as imported_before

from lightning_paral import ConfigurationError, ParalFSDPStrategy, ParalPipelineStrategy, RankFailedError
from tests.models.chain import Chain, loader
from tests.models.split_layers import PLAN, SplitLayers
from tests.running import quiet_trainer

Use = Callable[[Any], Any]


def sums(module: Any) -> None:
    dist.all_reduce(torch.ones(2))


def sums_by_keyword(module: Any) -> None:
    dist.all_reduce(tensor=torch.ones(2), op=dist.ReduceOp.SUM, group=dist.group.WORLD)


def sums_in_own_group(module: Any) -> None:
    dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo"))


def gathers(module: Any) -> None:
    dist.all_gather([torch.empty(2) for _ in range(dist.get_world_size())], torch.ones(2))


def gathers_objects(module: Any) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), "name")


def gathers_with_gradients(module: Any) -> None:
    torch.distributed.nn.functional.all_gather(torch.ones(2))


def takes_maximum(module: Any) -> None:
    largest = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest == dist.get_world_size() - 1


def sums_over_data_ranks(module: Any) -> None:
    ones = torch.ones(2)
    dist.all_reduce(ones, group=module.trainer.strategy.dims.data_group())
    assert ones.tolist() == [module.trainer.strategy.dims.data_size] * 2
    assert len(imported_before(torch.ones(1), group=module.trainer.strategy.dims.data_group())) == ones[0]
    assert module.trainer.strategy.reduce(torch.ones(()), reduce_op="sum") == ones[0]
    dist.barrier()


def fit(pipelined: bool, world_size: int, use: Use) -> str:
    """Use a function in a hook, which all ranks call; return the error."""
    before = dist.all_reduce, torch.distributed.nn.functional.all_gather
    cls: Any = Chain if pipelined else SplitLayers

    class Uses(cls):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            use(self)

    options: Any = {"stages": 2} if pipelined else {"tensor_parallel": 2, "plan": PLAN}
    strategy = (ParalPipelineStrategy if pipelined else ParalFSDPStrategy)(split="global", **options)
    message = ""
    try:
        quiet_trainer(devices=world_size, strategy=strategy, max_steps=1).fit(Uses(), loader(1))
    except (ConfigurationError, RankFailedError) as error:
        message = str(error)
    assert before == (dist.all_reduce, torch.distributed.nn.functional.all_gather)
    return message


@pytest.mark.parametrize("pipelined", [False, True], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_and_gathers_over_all_ranks_are_refused(on_ranks, pipelined: bool, world_size: int) -> None:
    for use, name in {
        sums: "torch.distributed.all_reduce",
        sums_by_keyword: "torch.distributed.all_reduce",
        sums_in_own_group: "torch.distributed.all_reduce",
        gathers: "torch.distributed.all_gather",
        gathers_objects: "torch.distributed.all_gather_object",
        gathers_with_gradients: "torch.distributed.nn.functional.all_gather",
    }.items():
        messages = on_ranks(world_size, fit, pipelined, world_size, use)
        assert all(f"{name} was called over all ranks, but ranks" in each for each in messages)
    ranks = "0, 1" if world_size == 2 or not pipelined else "0, 2"
    assert f"ranks {ranks} have the same samples" in messages[0]


@pytest.mark.parametrize("pipelined", [False, True], ids=["tensor", "pipeline"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_other_collectives_run(on_ranks, pipelined: bool, world_size: int) -> None:
    for use in (takes_maximum, sums_over_data_ranks):
        assert on_ranks(world_size, fit, pipelined, world_size, use) == [""] * world_size
