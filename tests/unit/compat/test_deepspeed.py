"""Canaries: DeepSpeed still behaves as `compat.deepspeed` expects."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_paral.compat.deepspeed import engine as runtime
from lightning_paral.compat.private_name import check_names
from lightning_paral.errors import PrivateNameError
from tests.unit.compat.test_names import import_deepspeed


@pytest.fixture(autouse=True)
def _deepspeed() -> Iterator[None]:
    import_deepspeed()
    import deepspeed

    before = deepspeed.comm.comm.cdb
    yield
    runtime.use_backend(before)


# At the start of a run


def test_renamed_global_raises_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import parameter_offload

    monkeypatch.delattr(parameter_offload, "FWD_MODULE_STACK")

    with pytest.raises(PrivateNameError, match=r"FWD_MODULE_STACK to know which module .* no such name"):
        check_names.__wrapped__("deepspeed")


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
    runtime.use_backend(recorder)

    dist.reduce(tensor, 0)
    dist.reduce_scatter_fn(tensor, tensor)
    dist.allgather_fn(tensor, tensor)

    called = [call for call in recorder.calls if not call[0].startswith(("is_", "has_", "get_"))]
    assert called == [
        ("reduce", ["async_op", "dst", "group", "op", "tensor"]),
        ("reduce_scatter_tensor", ["async_op", "group", "input_tensor", "op", "output_tensor"]),
        ("all_gather_into_tensor", ["async_op", "group", "input_tensor", "output_tensor"]),
    ], "DeepSpeed calls its backend in another way: GlooBackend of engines/zero/process.py would not be used"


def test_shared_memory_is_disabled() -> None:
    from deepspeed.comm.torch import build_shm_op

    runtime.disable_shared_memory()

    assert build_shm_op() is None, "DeepSpeed compiles shared-memory collectives under another name"
