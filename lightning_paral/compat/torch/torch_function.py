"""Run torch's own operations on a tensor, whatever its class overrides."""

from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass

from lightning_paral.compat.private_name import PrivateName

__all__ = ["DisableTorchFunction", "DisableTorchFunctionSubclass"]

NAMES = (
    PrivateName(
        name="torch._C.DisableTorchFunctionSubclass",
        purpose="to reach torch's own operations inside __torch_function__",
        reason="torch's documentation names it, but only in torch._C",
        seen="torch 2.11 to 2.13",
        upstream="https://docs.pytorch.org/docs/stable/notes/extending.html",
    ),
    PrivateName(
        name="torch._C.DisableTorchFunction",
        purpose="to hide our own operations from our TorchFunctionMode",
        reason="torch.overrides has no function that disables modes as well as subclasses",
        seen="torch 2.11 to 2.13",
    ),
)
