"""Canaries: DeepSpeed still behaves as `compat.deepspeed` expects."""

import ast
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Linear

from lightning_paral.compat import checks
from lightning_paral.compat.deepspeed import (
    backend,
    counters,
    forward_stack,
    linear,
    modules,
    operators,
    output_hooks,
    parameters,
    process_groups,
    processor,
    remains,
    weight_dtype,
    zero_init,
)
from lightning_paral.engines.zero.training.gradients import PartitionedGradients
from lightning_paral.errors import PrivateNameError
from tests.unit.compat.renaming import rename
from tests.unit.compat.test_names import import_deepspeed

ZERO_INIT = "deepspeed.runtime.zero.partition_parameters.Init"


@pytest.fixture(autouse=True)
def _deepspeed() -> Iterator[None]:
    import_deepspeed()
    before = backend.current_backend()
    yield
    backend.use_backend(before)


def source_of(function: Callable[..., Any]) -> str:
    for cell in getattr(function, "__closure__", None) or ():  # inside the wrapper of DeepSpeed's profiling
        if inspect.isfunction(cell.cell_contents):
            function = cell.cell_contents
    return textwrap.dedent(inspect.getsource(function))


# At the start of a run


def test_renamed_global_raises_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime import torch_autocast

    monkeypatch.delattr(torch_autocast, "TORCH_AUTOCAST_INITIALIZED")

    with pytest.raises(PrivateNameError, match=r"TORCH_AUTOCAST_INITIALIZED to keep DeepSpeed from .* no such name"):
        checks.check_names.__wrapped__("deepspeed")


def test_renamed_attribute_raises_when_an_engine_is_created() -> None:
    class Renamed:
        __module__ = "deepspeed.runtime.engine"
        __qualname__ = "DeepSpeedEngine"

    with pytest.raises(PrivateNameError, match=r"_running_engine_backward .* instances do not have it"):
        checks.check_instance("deepspeed", Renamed())


def test_optional_attributes_may_be_missing() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    checks.check_instance("deepspeed", object.__new__(DeepSpeedZeroOptimizer))


@pytest.mark.parametrize("name", ["clip_grad", "overlap_comm", "round_robin_gradients", "cpu_offload"])
def test_renamed_attribute_raises_before_an_engine_is_created(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    rename(DeepSpeedZeroOptimizer, name, monkeypatch)

    with pytest.raises(PrivateNameError, match=rf"DeepSpeedZeroOptimizer\.{name} to .* has no attribute of that name"):
        checks.check_names.__wrapped__("deepspeed")


def test_renamed_attribute_for_clipping_raises_when_a_fit_begins() -> None:
    engine: Any = SimpleNamespace(zero_optimization_stage=lambda: 2, optimizer=SimpleNamespace())
    unused: Any = None

    with pytest.raises(PrivateNameError, match=r"clip_grad to clip gradients by the norm"):
        PartitionedGradients(engine, unused, unused, unused)


# Collectives


class Recorder:
    """Replaces DeepSpeed's backend."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def __getattr__(self, name: str) -> Any:
        def record(*args: Any, **kwargs: Any) -> bool:
            self.calls.append((name, sorted(kwargs)))
            return True

        return record


def test_collectives_of_deepspeed_reach_the_methods_that_are_overridden() -> None:
    import deepspeed.comm as dist

    tensor, recorder = torch.zeros(2), Recorder()
    backend.use_backend(recorder)

    dist.reduce(tensor, 0)
    dist.all_reduce(tensor)
    dist.reduce_scatter_fn(tensor, tensor)
    dist.allgather_fn(tensor, tensor)

    called = [call for call in recorder.calls if not call[0].startswith(("is_", "has_", "get_"))]
    assert called == [
        ("reduce", ["async_op", "dst", "group", "op", "tensor"]),
        ("all_reduce", []),
        ("reduce_scatter_tensor", ["async_op", "group", "input_tensor", "op", "output_tensor"]),
        ("all_gather_into_tensor", ["async_op", "group", "input_tensor", "output_tensor"]),
    ], "DeepSpeed calls its backend in another way: GlooBackend of engines/zero/runtime/gloo.py would not be used"


def test_shared_memory_is_disabled() -> None:
    from deepspeed.comm.torch import build_shm_op

    operators.disable_shared_memory()

    assert build_shm_op() is None, "DeepSpeed compiles shared-memory collectives under another name"


def test_enabled_shared_memory_raises() -> None:
    with pytest.raises(PrivateNameError, match=r"__compatible_ops__ to keep .* no longer disables them"):
        operators.check_shared_memory_disabled(SimpleNamespace(shm_comm_op=object()))


# State that a run leaves


def test_groups_of_a_run_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.utils import groups

    for name in ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device"):
        monkeypatch.setattr(groups, name, object())
    monkeypatch.setattr(groups, "_ALL_TO_ALL_GROUP", {"local_0": object()})

    process_groups.release_groups()

    kept = (groups._WORLD_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, groups.mesh_device)
    assert kept == (None, None, None), "DeepSpeed keeps process groups of the last run"
    assert groups._ALL_TO_ALL_GROUP == {}, "DeepSpeed keeps process groups of the last run"


def test_numbers_of_modules_and_parameters_are_set() -> None:
    before = counters.read_counters()

    counters.set_counters([70, 90])
    try:
        assert counters.read_counters() == [70, 90]
    finally:
        counters.set_counters(before)


def test_changed_default_of_the_count_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    monkeypatch.setattr(DeepSpeedZeRoOffload._register_deepspeed_module, "__defaults__", (0,))

    with pytest.raises(PrivateNameError, match=r"_register_deepspeed_module to make all ranks .* defaults are \(0,\)"):
        counters.read_counters()


def test_modules_of_a_run_are_removed_or_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    remains.forget_modules()

    monkeypatch.setattr(
        PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__params_to_release", lambda *_: set()
    )
    with pytest.raises(PrivateNameError, match=r"its decorators have no cache"):
        remains.forget_modules()


def test_linear_of_torch_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    monkeypatch.setattr(partition_parameters, "print_rank_0", lambda *_, **__: None)  # it needs the rank
    own = torch.nn.functional.linear
    with linear.preserve_linear():
        Patches._enable_mem_efficient_linear(object.__new__(Patches))
        assert torch.nn.functional.linear is not own, "DeepSpeed no longer replaces linear: the patch can go"
        linear.restore_linear()

        assert torch.nn.functional.linear is own, "DeepSpeed no longer keeps torch's own linear in linear_bk"

        Patches._enable_mem_efficient_linear(object.__new__(Patches))
        monkeypatch.delattr(Patches, "linear_bk")
        with pytest.raises(PrivateNameError, match=r"linear_bk to restore torch's own .* there is no such attribute"):
            linear.restore_linear()


def test_forward_passes_are_found_on_the_stack() -> None:
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    root, part = Linear(1, 1), Linear(1, 1)
    forward_stack.forget_forwards()
    FWD_MODULE_STACK.append(root)
    assert forward_stack.innermost_forward() is None

    FWD_MODULE_STACK.append(part)
    try:
        assert forward_stack.innermost_forward() is part
    finally:
        forward_stack.forget_forwards()


# Modules and parameters


def test_parameter_dictionaries_of_deepspeed_are_removed() -> None:
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict, _inject_parameters

    module = Linear(2, 2)
    kind, names = type(module._parameters), list(module._parameters)
    _inject_parameters(module, ZeROOrderedDict)
    divided: Any = module._parameters
    divided._in_forward = True

    modules.end_forward(module)
    modules.restore_container(module, kind)

    assert divided._in_forward is False, "DeepSpeed records in another way that a forward is running"
    assert (type(module._parameters), list(module._parameters)) == (kind, names)


def test_outputs_are_passed_as_tensors() -> None:
    seen = []

    def _post_forward_module_hook(module: Any, inputs: Any, output: Any) -> None:
        seen.append(output)

    module = Linear(1, 1)
    module.register_forward_hook(lambda *args: _post_forward_module_hook(*args))

    output_hooks.show_outputs_as(module, lambda output: "view")
    module(torch.zeros(1, 1))

    assert seen == ["view"]


def test_renamed_hook_raises() -> None:
    module = Linear(1, 1)
    module.register_forward_hook(lambda *args: None)

    with pytest.raises(PrivateNameError, match=r"_post_forward_module_hook to let modules return objects of any type"):
        output_hooks.show_outputs_as(module, lambda output: output)


def test_parameter_without_its_init_raises() -> None:
    parameter = SimpleNamespace(ds_active_sub_modules=set(), all_gather=lambda: None)

    with pytest.raises(PrivateNameError, match=r"all_gather to gather parameters .* not a closure over"):
        parameters.join_group(parameter, None)


# `zero.Init`


def test_init_replaces_the_constructors_that_are_restored() -> None:
    from deepspeed.runtime.zero.partition_parameters import Init

    replaced = [
        node.targets[0].attr
        for node in ast.walk(ast.parse(source_of(Init._add_tensor_creation_wrappers)))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and ast.unparse(node.targets[0].value) == "torch"
    ]

    assert set(replaced) == set(zero_init.CONSTRUCTORS), "zero.Init replaces other functions of torch than CONSTRUCTORS"


def test_dtype_is_kept_as_given() -> None:
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    with weight_dtype.keep_given_dtype():
        chosen = [Patches(enabled=False, dtype=dtype).dtype for dtype in (torch.float16, torch.float32)]

    assert chosen == [torch.float16, torch.float32]


# Backward passes and steps


CALLS = [
    (
        "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator",
        ("param_group[0].all_gather_coalesced(", "param.partition("),
        "users' writes to stage-3 parameters would be lost: gathering and releasing goes unnoticed",
    ),
    (f"{ZERO_INIT}._post_init_method", ("self._zero_init_param(",), "zero.Init shards by another method"),
    (f"{ZERO_INIT}._convert_to_zero_parameters", ("self._zero_init_param(",), "zero.Init shards by another method"),
    (f"{ZERO_INIT}.patch_init_and_builtins", ("self._post_init_method(module)",), "zero.Init shards by another method"),
    (
        "deepspeed.runtime.engine.DeepSpeedEngine._backward_post_hook",
        ("not self._running_engine_backward", "self._backward_epilogue()"),
        "the flag no longer keeps engines from ending a backward pass, or the epilogue does not end it",
    ),
    (
        "deepspeed.runtime.engine.DeepSpeedEngine.allreduce_gradients",
        ("self.optimizer.reduce_gradients(",),
        "stage 1 with overlap_comm would step on unreduced gradients",
    ),
    (
        "deepspeed.runtime.base_optimizer.ZeROOptimizer.scale_if_loss",
        ("self.torch_autocast_gradscaler", "self.loss_scaler"),
        "ZeRO scales losses in another way",
    ),
    (
        "deepspeed.ops.adam.DeepSpeedCPUAdam.__init__",
        ("from cpuinfo import get_cpu_info",),
        "DeepSpeedCPUAdam reads the processor in another way: cache_cpu_info has no effect",
    ),
]
"""Functions and classes of DeepSpeed, what their source has to say, and what would break without it."""


def test_code_of_deepspeed_calls_what_is_replaced() -> None:
    broken = [
        f"{name} lacks {text!r}: {effect}"
        for name, texts, effect in CALLS
        for text in texts
        if text not in source_of(pkgutil.resolve_name(name))
    ]

    assert not broken, "\n".join(broken)


def test_states_are_linked_by_a_public_function() -> None:
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    names = list(inspect.signature(lazy_init_hp_params_optimizer_state).parameters)

    assert names == ["lp_param_list", "flat_hp_partition", "optimizer_state"]


def test_function_that_reads_the_processor_is_restored() -> None:
    import cpuinfo

    plain = cpuinfo.get_cpu_info
    with processor.cache_cpu_info():
        assert cpuinfo.get_cpu_info is not plain
    assert cpuinfo.get_cpu_info is plain
