"""Canaries: torch still behaves as `lightning_paral.compat.torch` expects.

A failure means that torch has changed; its message says what would break.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Linear

from lightning_paral.compat.torch import dtensor, modules, tensors


@contextmanager
def one_rank() -> Iterator[None]:
    """Make a process group with a single rank."""
    assert dist.group.WORLD is None, "another test has left a process group"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dtensor.forget_meshes()
        dist.destroy_process_group()


def test_storages_without_memory_are_recognized() -> None:
    first, second = torch.empty(3, device="meta"), torch.empty(3, device="meta")

    assert tensors.identity_of(first.untyped_storage()) != tensors.identity_of(second.untyped_storage()), (
        "deferred construction would mistake two tensors for one"
    )


def test_hook_tables_hold_the_hooks_that_are_registered() -> None:
    module = Linear(2, 2)
    before = {name: set(table) for name, table in modules.hook_tables(module).items()}
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    module.register_forward_hook(lambda *_: None, always_call=True, with_kwargs=True)
    module.register_state_dict_post_hook(lambda *_: None)
    module.register_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_post_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)

    gained = {name for name, table in modules.hook_tables(module).items() if set(table) - before[name]}
    [wrapped] = modules.hooks_in(module, "_load_state_dict_pre_hooks").values()
    assert wrapped.__module__ == __name__, "hooks of FSDP2 would not be recognized"

    assert gained == before.keys(), "hooks are kept elsewhere: those of a run would stay on the module"
    assert set(modules.ALL) <= gained


def test_state_dicts_carry_versions_of_modules_in_an_attribute() -> None:
    state = nn.BatchNorm1d(2).state_dict()

    assert {"": {"version": 2}} in vars(state).values(), "batch norm of old checkpoints would load wrongly"


def test_meshes_of_earlier_groups_are_removed() -> None:
    for _ in range(2):
        with one_rank():
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("rows",))
            result = distribute_tensor(torch.ones(2), mesh, [Shard(0)]).cos()

            assert result.device_mesh is mesh, "results are on the mesh of an earlier run, whose group is gone"
