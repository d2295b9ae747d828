"""The backend that runs DeepSpeed's collectives, which is a module-level variable of DeepSpeed."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.collectives import all_gather_single, reduce_scatter_single

NAMES = (
    PrivateName(
        name="deepspeed.comm.comm.cdb",
        purpose="to run DeepSpeed's collectives through our own backend, and to remove it after a run",
        reason="init_distributed creates a TorchBackend, and no other backend, once per process; destroy_process_group "
        "also destroys torch's default group",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.comm.comm.default_pg_timeout",
        purpose="to create a backend with the timeout that init_distributed uses",
        reason="no public name gives this timeout",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.comm.torch.TorchBackend.all_gather_function",
        purpose="to call torch's collective under its current name, which raises no warning",
        reason="DeepSpeed calls it under its old name, which warns at every call in torch 2.13",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name="deepspeed.comm.torch.TorchBackend.reduce_scatter_function",
        purpose="to call torch's collective under its current name, which raises no warning",
        reason="DeepSpeed calls it under its old name, which warns at every call in torch 2.13",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    *(
        PrivateName(
            name=f"deepspeed.comm.torch.TorchBackend.{name}",
            purpose="to override it with an implementation for gloo",
            reason="DeepSpeed has no public way to replace its collectives for gloo",
            seen="deepspeed 0.19.8",
        )
        for name in ("reduce", "reduce_scatter_tensor", "all_reduce", "all_gather_into_tensor")
    ),
)


def current_backend() -> Any:
    """Return DeepSpeed's backend, or `None` if it has none."""
    import deepspeed

    return deepspeed.comm.comm.cdb


def make_backend(cls: Any, name: str) -> Any:
    """Return an instance of `cls`, a subclass of `TorchBackend`, for torch's backend `name` and the default group."""
    import deepspeed

    return cls(name, deepspeed.comm.comm.default_pg_timeout, None)


def use_backend(backend: Any) -> None:
    """Make DeepSpeed run its collectives through `backend`; `None` removes the current backend."""
    import deepspeed

    deepspeed.comm.comm.cdb = backend


def use_new_names(backend: Any) -> None:
    """Make `backend` call single-tensor collectives under their current names in torch.

    A filter could not ignore these warnings only where DeepSpeed causes them: torch attributes them to its own file.
    """
    backend.all_gather_function = all_gather_single
    backend.reduce_scatter_function = reduce_scatter_single
