"""Every operation of torch that draws random numbers draws on shards what one process draws, or raises."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_paral.compat.torch.dtensor import operation_handlers
from lightning_paral.compat.torch.sharding_strategies import has_strategy
from lightning_paral.engines.fsdp.sharded_ops import handlers

LAYOUTS = ("by rows", "by columns", "transposed")
DRAWN = {
    "normal_.default", "uniform_.default", "bernoulli_.float", "bernoulli_.Tensor", "random_.default",
    "cauchy_.default",
    "exponential_.default", "geometric_.default", "log_normal_.default", "rand_like.default", "randn_like.default",
    "rand_like.generator", "randint_like.default", "bernoulli.default", "bernoulli.p", "multinomial.default",
    "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", "poisson.default", "binomial.default",
    "_standard_gamma.default", "normal_functional.default", "dropout.default", "alpha_dropout.default", "normal.out",
    "uniform.out", "geometric.default",
}  # fmt: skip
REFUSED = {"native_dropout.default", "rrelu_with_noise.default", "rrelu_with_noise_functional.default"}
GIVEN = {
    "p": 0.5, "dropout_p": 0.5, "train": True, "training": True, "high": 100, "to": 100, "low": 5, "num_samples": 2,
    "size": [5, 4], "n": 5,
}  # fmt: skip
BY_TYPE = {"float": 0.5, "bool": False, "int": 1, "number": 0.5}


def drawing() -> Iterator[Any]:
    # Not dir(torch.ops.aten), which has only operations that were looked up before.
    names = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    for name in sorted(names):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            operation = getattr(packet, overload)
            takes_generator = any(argument.name == "generator" for argument in operation._schema.arguments)
            if takes_generator or torch.Tag.nondeterministic_seeded in operation.tags:
                yield operation


def call(operation: Any, tensor_of: Any) -> list[Tensor]:
    """Call the operation with tensors from `tensor_of`; return its results and its mutable arguments."""
    args, kwargs = [], {}
    for argument in operation._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            value = torch.tensor(100) if argument.name == "high" else tensor_of(operation, argument.name)
        elif argument.name in GIVEN:
            value = GIVEN[argument.name]
        elif argument.has_default_value():
            continue
        elif argument.name == "generator":
            value = torch.Generator().manual_seed(4)
        else:
            value = None if kind.startswith("Optional") else BY_TYPE[kind]
        if argument.kwarg_only or argument.has_default_value():
            kwargs[argument.name] = value
        else:
            args.append(value)
    torch.manual_seed(3)
    result = operation(*args, **kwargs)
    results = result if isinstance(result, list | tuple) else [result]
    return [value for value in (*results, *args) if isinstance(value, Tensor)]


def values_for(operation: Any, name: str) -> Tensor:
    torch.manual_seed(len(name))
    # Leaky units draw only for negative elements.
    return torch.rand(5, 4).mul(0.8).add(0.1).sub(1.0 if "rrelu" in str(operation) else 0.0)


@contextmanager
def our_handlers() -> Iterator[None]:
    registered = operation_handlers()
    before = dict(registered)
    registered.update(handlers(lambda: False))
    try:
        yield
    finally:
        registered.clear()
        registered.update(before)


def outcomes() -> dict[tuple[str, str], str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def plain_transposed(operation: Any, name: str) -> Tensor:
        return values_for(operation, name).t().contiguous().t()

    makers: dict[str, tuple[Any, Any]] = {
        "by rows": (values_for, lambda *called: distribute_tensor(values_for(*called), mesh, [Shard(0)])),
        "by columns": (values_for, lambda *called: distribute_tensor(values_for(*called), mesh, [Shard(1)])),
        "transposed": (
            plain_transposed,
            lambda *called: distribute_tensor(values_for(*called).t().contiguous(), mesh, [Shard(0)]).t(),
        ),
    }
    found = {}
    for operation in drawing():
        for layout in LAYOUTS:
            plain, sharded = makers[layout]
            try:
                expected = call(operation, plain)
            except (RuntimeError, NotImplementedError, IndexError, KeyError):
                continue  # it needs a GPU, or does not accept these tensors
            try:
                given = call(operation, sharded)
            except Exception as error:
                found[str(operation).removeprefix("aten."), layout] = type(error).__name__
                continue
            if not any(isinstance(value, DTensor) for value in given):
                continue
            whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in given]
            same = all(
                # Attention multiplies matrices, and shards add up products in a different order.
                one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=0.0, equal_nan=True)
                for one, other in zip(whole, expected, strict=True)
            )
            found[str(operation).removeprefix("aten."), layout] = "same" if same else "different numbers"
    return found


def all_outcomes() -> dict[tuple[str, str], str]:
    with our_handlers(), torch.no_grad():
        return outcomes()


def test_draws_on_shards_equal_one_process(on_ranks) -> None:
    for found in on_ranks(2, all_outcomes):
        assert [case for case, outcome in found.items() if outcome == "different numbers"] == []
        for layout in LAYOUTS:
            assert {name for name in DRAWN if found[name, layout] != "same"} == set()
            assert {found[name, layout] for name in REFUSED} == {"ConfigurationError"}


def drawn_on_grid() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
    drawn = []
    with our_handlers():
        for placements in (
            [Shard(0), Shard(1)],
            [Shard(0), Shard(0)],
            [Replicate(), Shard(1)],
            [Shard(1), Replicate()],
        ):
            target = distribute_tensor(torch.zeros(5, 7), mesh, placements)
            torch.manual_seed(3)
            drawn += [target.normal_().full_tensor(), torch.rand_like(target).full_tensor()]
    return drawn


def test_draws_on_several_dimensions_of_a_mesh(on_ranks) -> None:
    torch.manual_seed(3)
    expected = [torch.zeros(5, 7).normal_(), torch.rand(5, 7)] * 4
    for drawn in on_ranks(4, drawn_on_grid):
        torch.testing.assert_close(drawn, expected, rtol=0, atol=0)


HAS_LEAKY = has_strategy(torch.ops.aten.rrelu_with_noise.default)


def outputs_without_draws() -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.linspace(-1, 1, 20).view(5, 4), mesh, [Shard(0)])
    with our_handlers():
        return [torch.nn.functional.rrelu(sharded, training=False).full_tensor()]


@pytest.mark.skipif(not HAS_LEAKY, reason="this torch does not support it for DTensors")
def test_operations_that_draw_in_training_only_work_in_evaluation(on_ranks) -> None:
    expected = [torch.nn.functional.rrelu(torch.linspace(-1, 1, 20).view(5, 4), training=False)]
    for given in on_ranks(2, outputs_without_draws):
        torch.testing.assert_close(given, expected)
