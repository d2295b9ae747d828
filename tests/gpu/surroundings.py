"""Compile operators, and check whether the process groups of the strategies work on this machine."""

import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback

from lightning_paral.comm import ALL_REDUCE
from tests.gpu.place import Facts, check_installed, join, num_ranks, of_ranks, root_device, synchronize, trainer_options
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

LENGTHS = (1, 5, 1000, 3_000_001)


def build_operators(device: str) -> Facts:
    """Compile DeepSpeed's operators for NVMe, or find them compiled."""
    check_installed("paral_zero")
    from lightning_paral.engines.zero.offload import load_operators
    from lightning_paral.engines.zero.process import choose_accelerator

    choose_accelerator(torch.device(device))
    facts = Facts()
    began = time.perf_counter()
    try:
        load_operators("tests.gpu")
        facts["async_io"] = f"{time.perf_counter() - began:.1f} s"
    except Exception as error:
        facts.require(False, f"async_io: {type(error).__name__}: {str(error)[-1500:]}")
    return facts


def reduce(algorithm: str, device: str, num_bytes: int) -> Facts:
    """Check that an all-reduce algorithm returns the sum, bit-identical on all ranks, and time it. *Collective*."""
    join(device)
    facts, worst, identical = Facts(), 0.0, True
    for length in LENGTHS:
        terms = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(num_ranks())]
        tensor = terms[dist.get_rank()].to(root_device(device), copy=True)
        ALL_REDUCE[algorithm](tensor)
        exact = torch.stack(terms).double().sum(dim=0)
        worst = max(worst, (tensor.cpu().double() - exact).abs().max().item())
        others = [torch.empty_like(tensor) for _ in terms]
        dist.all_gather(others, tensor)
        identical &= all(torch.equal(other, tensor) for other in others)
    facts.close("error", worst, 1e-5)
    facts["identical"] = identical
    facts.require(identical, "the ranks hold different bits")
    tensor = torch.ones(num_bytes // 4, device=root_device(device))
    for _ in range(2):  # the first one warms up
        dist.barrier()
        began = time.perf_counter()
        ALL_REDUCE[algorithm](tensor)
        synchronize(device)
    facts[f"s for {num_bytes / 2**20:.1f} MiB"] = time.perf_counter() - began
    return facts


def cpu_path(device: str) -> Facts:
    """Exchange CPU tensors and objects, also through a strategy, in a group whose ranks have GPUs. *Collective*."""
    facts, means = Facts(), []

    def reduce_by_strategy(trainer: Any, pl_module: Any) -> None:
        means.append(trainer.strategy.reduce(torch.tensor(float(dist.get_rank()))).item())

    options = trainer_options(device) | {"callbacks": [LambdaCallback(on_train_start=reduce_by_strategy)]}
    quiet_trainer(strategy="paral_ddp", max_steps=1, **options).fit(Regression(), regression_data(1, num_ranks()))
    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor)
    found = (of_ranks({"rank": dist.get_rank()}), tensor.item(), means)
    facts.require(found == ([{"rank": 0}, {"rank": 1}], 3.0, [0.5]), f"objects, sum and mean are {found}")
    return facts
