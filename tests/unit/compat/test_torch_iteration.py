"""Canary: an iteration of FSDP2 can be started and reset on every tested version of torch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_paral.compat.torch.iteration import pre_forward, reset_iteration


def test_an_iteration_begins_without_arguments_on_cuda_and_can_be_reset() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))), nn.Linear(2, 2))
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    reset_iteration(module)  # before FSDP2 is initialized: resetting must not hide the original error
    state = module._get_fsdp_state()
    state._lazy_init()
    state._device = torch.device("cuda")  # only decides whether arguments are moved

    assert pre_forward(state, module) == ((), {})
    assert type(module[1].weight) is nn.Parameter
    reset_iteration(module)
    assert isinstance(module[1].weight, DTensor)
    assert pre_forward(state, module, (1,), {"named": None}) == ((1,), {"named": None})
    reset_iteration(module)

    state._device = torch.device("cpu")
    module(torch.ones(1, 2)).sum().backward()
    module(torch.ones(1, 2)).sum()
    reset_iteration(module)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    module(torch.ones(1, 2)).sum().backward()
