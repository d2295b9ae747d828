"""The backend by which DeepSpeed runs its collectives, which it keeps in a global of a module."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName
from lightning_paral.compat.torch.collectives import all_gather_single, reduce_scatter_single

NAMES = (
    PrivateName(
        name="deepspeed.comm.comm.cdb",
        purpose="to let DeepSpeed's collectives run by a backend of ours, and to take it away after a run",
        reason="init_distributed makes a TorchBackend, once in a process, and destroy_process_group takes torch's "
        "default group with it",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.comm.comm.default_pg_timeout",
        purpose="to make a backend as init_distributed does",
        reason="that is where it is",
        seen="deepspeed 0.19.8",
    ),
    PrivateName(
        name="deepspeed.comm.torch.TorchBackend.all_gather_function",
        purpose="to call the collective by the name that does not warn",
        reason="DeepSpeed calls the old name, which warns at every call since torch 2.13",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name="deepspeed.comm.torch.TorchBackend.reduce_scatter_function",
        purpose="to call the collective by the name that does not warn",
        reason="DeepSpeed calls the old name, which warns at every call since torch 2.13",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    *(
        PrivateName(
            name=f"deepspeed.comm.torch.TorchBackend.{name}",
            purpose="to run it another way on gloo, by overriding it",
            reason="init_distributed makes a TorchBackend, and takes no other; under another name it would be its own",
            seen="deepspeed 0.19.8",
        )
        for name in ("reduce", "reduce_scatter_tensor", "all_reduce", "all_gather_into_tensor")
    ),
)


def current_backend() -> Any:
    """Return DeepSpeed's backend, `None` if it has none."""
    import deepspeed

    return deepspeed.comm.comm.cdb


def make_backend(kind: Any, name: str) -> Any:
    """Return a backend of class `kind`, a `TorchBackend`, over the default process group, made for torch's `name`."""
    import deepspeed

    return kind(name, deepspeed.comm.comm.default_pg_timeout, None)


def use_backend(backend: Any) -> None:
    """Let DeepSpeed's collectives run by `backend`, or by none if it is `None`."""
    import deepspeed

    deepspeed.comm.comm.cdb = backend


def use_new_names(backend: Any) -> None:
    """Let `backend` call collectives on one tensor by the names that torch has for them now.

    The warning at the old ones names torch's own file, whoever called: it could not be left out for DeepSpeed alone.
    """
    backend.all_gather_function = all_gather_single
    backend.reduce_scatter_function = reduce_scatter_single
