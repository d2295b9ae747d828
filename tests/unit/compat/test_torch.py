"""Canaries: torch still behaves as `lightning_paral.compat.torch` expects.

A failure means that torch has changed; its message says what would break.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Linear, Parameter

from lightning_paral.compat.torch import autograd, dtensor, modules, tensors
from lightning_paral.compat.torch.optimizers import UnscalingGradScaler


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


def test_version_counts_in_place_writes_of_views_and_not_of_detached_data() -> None:
    tensor = torch.zeros(3)
    before = autograd.version_of(tensor)

    tensor[0].add_(1)

    assert autograd.version_of(tensor) == before + 1, "a write through a view no longer increments the version"
    tensor.data.add_(1)
    assert autograd.version_of(tensor) == before + 1, "writes through `.data` are counted twice"


def test_storages_count_their_users() -> None:
    tensor = torch.zeros(3)

    assert tensors.use_count(tensor) == 2, (
        "an unshared tensor has another count: stage 3 cannot tell whether users hold it"
    )
    view = tensor[1:]
    assert tensors.use_count(tensor) == 3, "a view no longer counts: users' writes to views would be lost"
    assert tensors.identity_of(view.untyped_storage()) == tensors.identity_of(tensor.untyped_storage())


def test_storages_without_memory_are_recognized() -> None:
    first, second = torch.empty(3, device="meta"), torch.empty(3, device="meta")

    assert tensors.identity_of(first.untyped_storage()) != tensors.identity_of(second.untyped_storage()), (
        "deferred construction would mistake two tensors for one"
    )


def test_callback_queued_in_a_hook_runs_once_after_the_backward_pass() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    loss = (first * second).sum()
    loss.register_hook(lambda _: autograd.call_at_end_of_backward(lambda: seen.append((first.grad, second.grad))))

    loss.backward()

    assert len(seen) == 1, "the callback at the end of a backward pass did not run: gradients would not be averaged"
    assert None not in seen[0], "the callback ran before all gradients were there"


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
    assert modules.unwrapped(wrapped).__name__ == "<lambda>"

    assert gained == before.keys(), "hooks are kept elsewhere: those of a run would stay on the module"
    new = {name for name in vars(module) if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))}
    assert new <= before.keys() | {"_non_persistent_buffers_set"}, "torch has another kind of hooks: add it"


def test_state_dicts_carry_versions_of_modules() -> None:
    state = nn.BatchNorm1d(2).state_dict()

    assert modules.versions_in(state) == {"": {"version": 2}}, "batch norm of old checkpoints would load wrongly"
    copied: OrderedDict[str, Any] = OrderedDict(state)
    assert modules.versions_in(copied) is None
    modules.set_versions(copied, modules.versions_in(state))
    assert modules.versions_in(copied) == {"": {"version": 2}}


def test_scaler_unscales_and_steps_through_a_replaced_method() -> None:
    class Scaler(UnscalingGradScaler):
        infinite = 0.0

        def unscale_gradients(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor) -> Any:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(inv_scale)
            return {found_inf.device: torch.full_like(found_inf, self.infinite)}

    parameter = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for infinite, value in ((0.0, -1.0), (1.0, -1.0)):
        scaler = Scaler("cpu", init_scale=8.0)
        scaler.infinite = infinite
        scaler.scale(torch.tensor(1.0))
        parameter.grad = torch.tensor([8.0])
        scaler.step(optimizer)
        scaler.update()

        assert parameter.item() == value, "step() unscales in another way: ranks would skip different steps"


def test_meshes_of_earlier_groups_are_removed() -> None:
    for _ in range(2):
        with one_rank():
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("rows",))
            result = distribute_tensor(torch.ones(2), mesh, [Shard(0)]).cos()

            assert result.device_mesh is mesh, "results are on the mesh of an earlier run, whose group is gone"


def test_hooks_of_a_load_run_between_those_of_the_user() -> None:
    module, called = torch.nn.Linear(2, 2), []
    module.register_load_state_dict_pre_hook(lambda *_: called.append("user's pre-hook"))
    module.register_load_state_dict_post_hook(lambda *_: called.append("user's post-hook"))

    with modules.loading_hooks(module, lambda *_: called.append("before"), lambda *_: called.append("after")):
        module.load_state_dict(module.state_dict())
    module.load_state_dict(module.state_dict())

    assert called == ["user's pre-hook", "before", "after", "user's post-hook", "user's pre-hook", "user's post-hook"]
