"""Do what torch does with a tensor, whatever its class makes of it."""

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
        purpose="to keep a TorchFunctionMode of ours from seeing our own operations",
        reason="torch.overrides has nothing that leaves out modes as well as subclasses",
        seen="torch 2.11 to 2.13",
    ),
)
