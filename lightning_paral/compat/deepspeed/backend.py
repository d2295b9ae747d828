"""The backend that runs DeepSpeed's collectives, kept in a module's global variable."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.collectives import all_gather_single, reduce_scatter_single

NAMES = (
    PrivateName(
        name="deepspeed.comm.comm.cdb",
        purpose="to run DeepSpeed's collectives through our own backend, and to remove it after a run",
        reason="init_distributed makes a TorchBackend once per process, and destroy_process_group destroys torch's "
        "default group as well",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.comm.comm.default_pg_timeout",
        purpose="to make a backend with the timeout that init_distributed uses",
        reason="init_distributed takes its default timeout from here",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.comm.torch.TorchBackend.all_gather_function",
        purpose="to call the collective by the name that raises no warning",
        reason="DeepSpeed uses the old name, which warns at every call from torch 2.13 on",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name="deepspeed.comm.torch.TorchBackend.reduce_scatter_function",
        purpose="to call the collective by the name that raises no warning",
        reason="DeepSpeed uses the old name, which warns at every call from torch 2.13 on",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    *(
        PrivateName(
            name=f"deepspeed.comm.torch.TorchBackend.{name}",
            purpose="to override it with an implementation for gloo",
            reason="init_distributed makes a TorchBackend and accepts no other; a renamed method would not be reached",
            seen="deepspeed 0.19.8",
        )
        for name in ("reduce", "reduce_scatter_tensor", "all_reduce", "all_gather_into_tensor")
    ),
)


def current_backend() -> Any:
    """Return DeepSpeed's backend, or `None` if it has none."""
    import deepspeed

    return deepspeed.comm.comm.cdb


def make_backend(kind: Any, name: str) -> Any:
    """Return a `TorchBackend` of class `kind` for torch's backend `name`, over the default process group."""
    import deepspeed

    return kind(name, deepspeed.comm.comm.default_pg_timeout, None)


def use_backend(backend: Any) -> None:
    """Run DeepSpeed's collectives through `backend`; `None` leaves DeepSpeed without one."""
    import deepspeed

    deepspeed.comm.comm.cdb = backend


def use_new_names(backend: Any) -> None:
    """Let `backend` call single-tensor collectives by their current names in torch.

    The warning for the old names is attributed to torch's own file, so it cannot be filtered for DeepSpeed alone.
    """
    backend.all_gather_function = all_gather_single
    backend.reduce_scatter_function = reduce_scatter_single
