"""Canaries: torch still behaves as `lightning_paral.compat.torch` expects.

A failure means that torch has changed; its message says what would break.
"""

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Linear, Module, Parameter

from lightning_paral.compat import checks
from lightning_paral.compat.torch import (
    archives,
    backward,
    ddp_ignored,
    derivatives,
    dispatch,
    distributed_checkpoint,
    dtensor,
    fake_tensors,
    foreach,
    fsdp_group,
    fsdp_param,
    fsdp_state,
    instance_classes,
    iteration,
    module_hooks,
    modules,
    muon,
    patches,
    process_groups,
    pytree,
    replicas,
    sharded_classes,
    sharding_cache,
    state_dicts,
    storages,
    tensor_hooks,
    versions,
    wrapper_tensors,
)
from lightning_paral.compat.torch.grad_scaler import UnscalingGradScaler
from lightning_paral.compat.torch.torch_function import DisableTorchFunctionSubclass
from lightning_paral.engines.fsdp.unsharded_writes import WatchedGroup
from lightning_paral.errors import PrivateNameError
from tests.unit.compat.renaming import rename


@contextmanager
def one_rank() -> Iterator[None]:
    """Make a process group with a single rank."""
    assert dist.group.WORLD is None, "another test has left a process group"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        sharding_cache.forget_meshes()
        dist.destroy_process_group()


@pytest.fixture
def world() -> Iterator[None]:
    with one_rank():
        yield


def sharded() -> Any:
    root: Any = nn.Sequential(Linear(4, 4), Linear(4, 2))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(root[0], mesh=mesh)
    return fully_shard(root, mesh=mesh)


def test_version_counts_in_place_writes_of_views_and_not_of_detached_data() -> None:
    tensor = torch.zeros(3)
    before = versions.version_of(tensor)

    tensor[0].add_(1)

    assert versions.version_of(tensor) == before + 1, "a write through a view no longer increments the version"
    tensor.data.add_(1)
    assert versions.version_of(tensor) == before + 1, "writes through `.data` are counted twice"


def test_storages_count_their_users() -> None:
    tensor = torch.zeros(3)

    assert storages.use_count(tensor) == 2, (
        "an unshared tensor has another count: stage 3 cannot tell whether users hold it"
    )
    view = tensor[1:]
    assert storages.use_count(tensor) == 3, "a view no longer counts: users' writes to views would be lost"
    assert storages.identity_of(view.untyped_storage()) == storages.identity_of(tensor.untyped_storage())


def test_storages_without_memory_are_recognized() -> None:
    first, second = torch.empty(3, device="meta"), torch.empty(3, device="meta")

    assert storages.identity_of(first.untyped_storage()) != storages.identity_of(second.untyped_storage()), (
        "deferred construction would mistake two tensors for one"
    )


@pytest.mark.filterwarnings("error:TypedStorage:UserWarning")
def test_typed_storages_are_found_without_a_warning() -> None:
    wrapped = torch.zeros(2).untyped_storage()
    storage = torch.storage.TypedStorage(wrap_storage=wrapped, dtype=torch.float32, _internal=True)

    assert isinstance(storages.untyped(storage), torch.UntypedStorage)
    assert storages.untyped("no storage") is None


def test_callback_queued_in_a_hook_runs_once_after_the_backward_pass() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen = []
    loss = (first * second).sum()
    loss.register_hook(lambda _: backward.call_at_end_of_backward(lambda: seen.append((first.grad, second.grad))))

    loss.backward()

    assert len(seen) == 1, "the callback at the end of a backward pass did not run: gradients would not be averaged"
    assert None not in seen[0], "the callback ran before all gradients were there"


def test_backward_passes_are_checked_with_their_outputs_and_inputs() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    undo = derivatives.check_backward_passes(lambda outputs, inputs: seen.append((tuple(outputs), tuple(inputs))))

    total = (2 * x).sum()
    (slope,) = torch.autograd.grad(total, x, retain_graph=True)
    total.backward(retain_graph=True)
    undo()
    total.backward()

    assert torch.equal(slope, torch.full((2,), 2.0))
    assert [(len(outputs), len(inputs)) for outputs, inputs in seen] == [(1, 1), (1, 0)]
    assert seen[0][0][0] is total
    assert seen[0][1][0] is x


def test_transforms_are_noticed() -> None:
    seen: list[bool] = []

    def noting(x: Tensor) -> Tensor:
        seen.append(derivatives.is_in_transform())
        return x.sum()

    noting(torch.ones(2))
    torch.func.grad(noting)(torch.ones(2))
    torch.func.vmap(noting)(torch.ones(2, 2))
    torch.func.jvp(noting, (torch.ones(2),), (torch.ones(2),))
    with torch.autograd.forward_ad.dual_level():
        noting(torch.ones(2))
    noting(torch.ones(2))

    assert seen == [False, True, True, True, True, False]


def test_torch_function_is_disabled_and_restored() -> None:
    class Noisy(Tensor):
        pass

    noisy = torch.ones(2).as_subclass(Noisy)
    with DisableTorchFunctionSubclass():
        plain = noisy + 1

    assert type(plain) is Tensor
    assert type(noisy + 1) is Noisy


def test_modes_see_operations_unless_they_are_suspended() -> None:
    names = []

    class Seen(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.ones(2)
        with dispatch.without_modes():
            torch.zeros(2)

    assert any("ones" in name for name in names), "modes do not see operations: construction is not deferred"
    assert not any("zeros" in name for name in names), "suspended modes see operations: the tape records itself"


def test_schemas_tell_arguments_and_mutations() -> None:
    schema = dispatch.schema_of(torch.ops.aten.add_.Tensor)

    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write
    assert schema.arguments[1].alias_info is None
    assert schema.returns


def test_modules_keep_entries_of_their_dictionaries() -> None:
    class Guarded(Linear):
        def register_parameter(self, name: str, param: Parameter | None) -> None:
            assert not hasattr(self, "sealed")
            super().register_parameter(name, param)

    module = Guarded(2, 2)
    module.sealed = True
    parameter, buffer = Parameter(torch.zeros(2, 2)), torch.ones(1)
    modules.own_parameters(module)["weight"] = parameter
    modules.own_buffers(module)["mask"] = buffer

    assert module.weight is parameter, "what is put into a module's dictionary is not an attribute of the module"
    assert module.mask is buffer
    assert list(modules.own_children(nn.Sequential(module)).values()) == [module]


def test_a_copy_for_data_parallel_has_dictionaries_of_its_own() -> None:
    module = nn.Sequential(Linear(2, 2))

    replica = replicas.copy_without_values(module)

    assert type(replica) is nn.Sequential
    assert modules.own_children(replica) is not modules.own_children(module), "replicas would change the master"
    assert modules.own_parameters(replica) == {}


class Registering(nn.Linear):
    registered: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Registering.registered.append(cls)


class Named:
    def name(self) -> str:
        return "of a base"


class Scaled(Named):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)  # type: ignore[misc]


@pytest.mark.parametrize("original", [nn.Linear, Registering])
def test_classes_of_single_modules_have_all_methods_of_a_mixin(original: type[nn.Linear]) -> None:
    module, x = original(2, 3), torch.ones(1, 2)
    expected = 2 * module(x)

    module.__class__ = instance_classes.subclass_of(original, Scaled, {"bias_name": "bias"})

    assert torch.equal(module(x), expected)
    assert (module.name(), module.bias_name) == ("of a base", "bias")
    assert isinstance(module, original)
    assert Registering.registered == []


def test_hook_tables_hold_the_hooks_that_are_registered() -> None:
    module = Linear(2, 2)
    before = {name: set(table) for name, table in module_hooks.hook_tables(module).items()}
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    module.register_forward_hook(lambda *_: None, always_call=True, with_kwargs=True)
    module.register_state_dict_post_hook(lambda *_: None)
    module.register_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    module.register_load_state_dict_post_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)

    gained = {name for name, table in module_hooks.hook_tables(module).items() if set(table) - before[name]}
    [wrapped] = module_hooks.hooks_in(module, "_load_state_dict_pre_hooks").values()
    assert module_hooks.unwrapped(wrapped).__name__ == "<lambda>"

    assert gained == before.keys(), "hooks are kept elsewhere: those of a run would stay on the module"
    new = {name for name in vars(module) if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))}
    assert new <= before.keys() | {"_non_persistent_buffers_set"}, "torch has another kind of hooks: add it"


def test_tensor_hooks_are_listed() -> None:
    parameter = Parameter(torch.zeros(2))
    assert not tensor_hooks.gradient_hooks(parameter)
    assert not tensor_hooks.post_accumulate_grad_hooks(parameter)

    parameter.register_hook(print)
    parameter.register_post_accumulate_grad_hook(print)

    assert list(tensor_hooks.gradient_hooks(parameter).values()) == [print]
    assert list(tensor_hooks.post_accumulate_grad_hooks(parameter).values()) == [print]


def test_state_dicts_carry_versions_of_modules() -> None:
    state = nn.BatchNorm1d(2).state_dict()

    assert state_dicts.versions_in(state) == {"": {"version": 2}}, "batch norm of old checkpoints would load wrongly"
    copied: OrderedDict[str, Any] = OrderedDict(state)
    assert state_dicts.versions_in(copied) is None
    state_dicts.set_versions(copied, state_dicts.versions_in(state))
    assert state_dicts.versions_in(copied) == {"": {"version": 2}}


def test_each_submodule_is_saved_and_loaded_by_replaced_methods() -> None:
    class WithExtra(Linear):
        def get_extra_state(self) -> Any:
            return {"extra": 1}

        def set_extra_state(self, state: Any) -> None:
            sharding_cache.forget_meshes()

    module = nn.Sequential(WithExtra(2, 2), Linear(2, 2))
    saved, loaded = [], []

    def save(part: Module, own: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        saved.append(prefix)
        own(destination, prefix, keep_vars)

    def load(part: Module, own: Any, state: Any, prefix: str, about: Any, *rest: Any) -> None:
        loaded.append(prefix)
        assert [type(each) for each in rest] == [bool, list, list, list]
        own(state, prefix, about, *rest)

    with state_dicts.save_submodules_by(module, save):
        state = module.state_dict()
    with state_dicts.load_submodules_by(module, load):
        module.load_state_dict(state)

    assert saved == loaded == ["", "0.", "1."], "state_dict calls other methods: shards would be saved as full tensors"
    assert [name for name in state if name.endswith(state_dicts.EXTRA_STATE)] == ["0._extra_state"]
    assert "_save_to_state_dict" not in vars(module[0])


def test_load_hooks_can_be_skipped() -> None:
    module = Linear(2, 2)
    called = []
    module.register_load_state_dict_pre_hook(lambda *_: called.append(1))
    hooks = state_dicts.load_hooks(module)

    state_dicts.set_load_hooks(module, OrderedDict())
    module.load_state_dict(module.state_dict())
    assert not called, "hooks that rename entries would run twice"
    state_dicts.set_load_hooks(module, hooks)
    module.load_state_dict(module.state_dict())

    assert called == [1]


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


def test_foreach_functions_work_in_place() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([-6.0])]

    foreach.foreach_mul_(tensors, torch.tensor(2.0))
    assert [norm.item() for norm in foreach.foreach_norm(tensors, 2, dtype=torch.float32)] == [10.0, 12.0]
    foreach.foreach_clamp_min_(tensors, -7.0)
    foreach.foreach_clamp_max_(tensors, 7.0)
    assert [tensor.tolist() for tensor in tensors] == [[6.0, 7.0], [-7.0]]
    found = torch.zeros(1)
    foreach.check_and_unscale_([torch.tensor([torch.inf])], found, torch.tensor(1.0))
    assert found.item() == 1.0


def test_files_have_room_for_tensors_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    [fake] = fake_tensors.fake_tensors([((2, 3), torch.float32)])
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"w": fake}, path)

    offset = archives.record_offset(path)("data/0")
    data = bytearray(path.read_bytes())
    data[offset : offset + 24] = torch.arange(6, dtype=torch.float32).numpy().tobytes()
    path.write_bytes(data)

    assert torch.load(path)["w"].tolist() == [[0, 1, 2], [3, 4, 5]], (
        "torch.save leaves no space for the data, or in another place"
    )


def test_distributed_checkpoint_has_these_keys_and_offsets() -> None:
    flat, paths = distributed_checkpoint.flatten_state_dict({"a": {"b": [torch.ones(1), 2]}})

    assert set(flat) == {"a.b.0", "a.b.1"}, "sharded checkpoints would have keys that torch does not look for"
    assert paths["a.b.0"] == ("a", "b", 0)
    place = pickle.loads(pickle.dumps(distributed_checkpoint.StorageInfo("file", 1, 2)))
    assert (place.relative_path, place.offset, place.length) == ("file", 1, 2)


def test_wrapper_tensors_have_a_shape_and_no_memory() -> None:
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            raise AssertionError(func)

    made = wrapper_tensors.without_memory(Wrapper, [2**40], torch.bfloat16)

    assert (type(made), tuple(made.shape), made.dtype) == (Wrapper, (2**40,), torch.bfloat16)


def test_trees_equal_those_of_torch() -> None:
    leaves, spec = pytree.tree_flatten({"a": [1, (2,)]})

    assert leaves == pytree.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert pytree.tree_unflatten(leaves, spec) == {"a": [1, (2,)]}
    assert pytree.tree_map(str, [1]) == ["1"]
    assert pytree.tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]


def test_ddp_ignores_the_parameters_that_a_module_names() -> None:
    module = Linear(2, 2)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight"])

    assert ddp_ignored.ignored_by_ddp(module) == {"weight"}, "modules tell DDP what to ignore under another name"


def test_attributes_are_replaced_and_restored() -> None:
    class Base:
        inherited = 1

    class Owner(Base):
        own = 2

    undo = patches.replace_attributes(Owner, {"inherited": 3, "own": 4})
    assert (Owner.inherited, Owner.own) == (3, 4)
    undo()

    assert (Owner.inherited, Owner.own) == (1, 2)
    assert "inherited" not in vars(Owner)
    with pytest.raises(AttributeError):
        patches.replace_attributes(Owner, {"gone": 1})


def test_muon_calls_the_replaced_function() -> None:
    parameter = Parameter(torch.eye(3))
    calls = []

    def around(torchs: Any) -> Any:
        return lambda *args, **kwargs: calls.append(1) or torchs(*args, **kwargs)

    undo = muon.replace_newton_schulz(around)
    parameter.grad = torch.eye(3)
    torch.optim.Muon([parameter]).step()
    undo()
    parameter.grad = torch.eye(3)
    torch.optim.Muon([parameter]).step()

    assert calls == [1], "Muon orthogonalizes in another way, and would do so on shards"


@pytest.mark.usefixtures("world")
def test_groups_are_alive_until_they_are_destroyed() -> None:
    group = dist.new_group([0])
    assert process_groups.is_alive(group)
    process_groups.default_store().set("key", "value")
    assert process_groups.default_store().get("key") == b"value"

    dist.destroy_process_group(group)

    assert not process_groups.is_alive(group), "destroyed groups count as alive: the next fit would use them"
    assert not process_groups.is_alive(None)


@pytest.mark.usefixtures("world")
def test_dtensors_call_handlers_first_and_keep_the_given_tensor() -> None:
    mesh = init_device_mesh("cpu", (1,))
    tensor = distribute_tensor(torch.zeros(2), mesh, [Shard(0)])
    handlers = dtensor.operation_handlers()
    handlers[torch.ops.aten.sin.default] = lambda operation, args, kwargs: torch.full((), 7.0)
    try:
        assert tensor.sin().item() == 7, "DTensor does not use the handlers: random numbers would differ by rank"
    finally:
        del handlers[torch.ops.aten.sin.default]

    local = torch.ones(2)
    dtensor.set_local(tensor, local)
    assert dtensor.local_of(tensor) is local
    assert tensor.full_tensor().tolist() == [1, 1], "a DTensor does not use the local tensor"
    dtensor.copy_data_and_layout(tensor, distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    assert tensor.placements == (Replicate(),)
    assert tensor.full_tensor().tolist() == [0, 0]


@pytest.mark.parametrize("strategy", ["paral_dp", "paral_ddp", "paral_fsdp", "paral_zero2"])
def test_renamed_attribute_raises_before_training(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_names.cache_clear()
    rename(FSDPParam, "_sharded_param_data", monkeypatch)

    with pytest.raises(PrivateNameError, match=r"FSDPParam\._sharded_param_data to make FSDP2 gather .* torch 2\.11"):
        Trainer(strategy=strategy, devices=1, accelerator="cpu", logger=False, barebones=True)


@pytest.mark.usefixtures("world")
def test_sharded_parameters_without_an_attribute_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    root = sharded()
    fsdp_state.initialize(root)
    [group] = fsdp_state.groups_of(root)
    [weight, _] = group.fsdp_params
    unused: Any = None
    WatchedGroup(group, unused, unused, unused)

    shard = dtensor.local_of(weight.sharded_param)
    rename(FSDPParam, "mesh_info", monkeypatch)
    for name in ("_sharded_param_data", "param_dtype", "mesh_info"):
        delattr(weight, name)
    weight.orig_dtype = torch.complex64

    with pytest.raises(PrivateNameError, match=r"_sharded_param_data .* FSDPParam has no attribute"):
        fsdp_param.gather_from(weight, shard, shard)
    with pytest.raises(PrivateNameError, match=r"param_dtype .* FSDPParam has no attribute"):
        fsdp_param.keep_dtype(weight)
    with pytest.raises(PrivateNameError, match=r"mesh_info .* instances do not have it"):
        WatchedGroup(group, unused, unused, unused)


@pytest.mark.usefixtures("world")
def test_steps_unshard_and_reshard_like_forward() -> None:
    root = sharded()
    fsdp_state.initialize(root)
    hooks = fsdp_state.ForwardHooks(root)
    [group] = fsdp_state.groups_of(root)
    events: list[str] = []
    fsdp_group.watch(group, lambda: events.append("gathered"), lambda: events.append("letting go"))
    [weight, _] = group.fsdp_params
    assert fsdp_param.name_of(weight) == "1.weight", "parameters are named before the root is known"
    assert fsdp_param.owners_of(weight) == [(root[1], "weight")]
    assert fsdp_param.unsharded_param(weight) is None

    given = iteration.pre_forward(hooks.state, root, (1,), {"two": 2})

    assert given == ((1,), {"two": 2}), "_pre_forward does not return the arguments"
    assert group.is_unsharded, "_pre_forward does not unshard"
    assert type(root[1].weight) is Parameter
    assert fsdp_param.unsharded_param(weight) is root[1].weight
    assert fsdp_param.is_plain(weight)
    assert fsdp_param.is_param_of(root[1].weight, weight)
    assert not fsdp_param.is_param_of(None, weight)
    own = fsdp_param.local_shard_view(weight, root[1].weight)
    assert own.shape == root[1].weight.shape

    output = hooks.after(root[1](root[0](torch.ones(1, 4))))
    root.reshard()
    assert isinstance(root[1].weight, DTensor)
    output.sum().backward()

    assert not group.is_unsharded
    assert root[1].weight.grad is not None, "the backward pass does not reduce the root's gradients"
    assert events[:2] == ["gathered", "letting go"], "unsharding is not noticed: writes in steps would be lost"
    assert events.count("gathered") == events.count("letting go")


@pytest.mark.usefixtures("world")
def test_an_iteration_begins_without_arguments_on_cuda_and_can_be_reset() -> None:
    root = sharded()
    iteration.reset_iteration(root)  # before FSDP2 is initialized: resetting must not hide the original error
    fsdp_state.initialize(root)
    state = root._get_fsdp_state()
    state._device = torch.device("cuda")  # only decides whether arguments are moved

    assert iteration.pre_forward(state, root) == ((), {})
    assert type(root[1].weight) is Parameter
    iteration.reset_iteration(root)
    assert isinstance(root[1].weight, DTensor)
    assert iteration.pre_forward(state, root, (1,), {"named": None}) == ((1,), {"named": None})
    iteration.reset_iteration(root)

    state._device = torch.device("cpu")
    root(torch.ones(1, 4)).sum().backward()
    root(torch.ones(1, 4)).sum()
    iteration.reset_iteration(root)
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())
    root(torch.ones(1, 4)).sum().backward()


@pytest.mark.usefixtures("world")
def test_assigned_memory_is_unsharded() -> None:
    root = sharded()
    fsdp_state.initialize(root)
    [weight, _] = fsdp_state.groups_of(root)[0].fsdp_params
    memory = torch.full((8,), 3.0)

    fsdp_param.gather_from(weight, memory, memory.view(2, 4))
    root.unshard()

    assert root[1].weight.tolist() == [[3.0] * 4] * 2, "FSDP2 gathers from elsewhere: assignments would be forgotten"


@pytest.mark.usefixtures("world")
def test_module_can_be_sharded_again_after_its_state_is_removed() -> None:
    module: Any = Linear(4, 4)
    original = dict(modules.own_parameters(module))
    mesh = init_device_mesh("cpu", (1,))
    hooks_before = {name: set(table) for name, table in module_hooks.hook_tables(module).items()}
    attributes = set(vars(module))
    for _ in range(2):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        modules.own_parameters(module).update(original)
        for name, table in module_hooks.hook_tables(module).items():
            for key in set(table) - hooks_before[name]:
                table.pop(key)
        module.__class__ = Linear
        for name in set(vars(module)) - attributes:
            assert fsdp_state.is_fsdp_attribute(name), (
                f"fully_shard sets {name}, which would be saved with hyper-parameters"
            )
            delattr(module, name)
        fsdp_state.forget(module)

    assert module(torch.ones(1, 4)).shape == (1, 4)
    pickle.dump(module, io.BytesIO())
    copy.deepcopy(module)


def test_meshes_of_earlier_groups_are_removed() -> None:
    for _ in range(2):
        with one_rank():
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("rows",))
            result = distribute_tensor(torch.ones(2), mesh, [Shard(0)]).cos()

            assert result.device_mesh is mesh, "results are on the mesh of an earlier run, whose group is gone"


@pytest.mark.usefixtures("world")
def test_sharded_modules_get_the_prepared_class() -> None:
    class Own(Linear):
        pass

    module: Any = Own(2, 2)
    sharded_classes.prepare_class(module)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))

    assert type(module).__name__ == "Own", "fully_shard creates its own class: messages and checkpoints would name that"
    assert isinstance(module, FSDPModule)
    assert isinstance(module, Own)
