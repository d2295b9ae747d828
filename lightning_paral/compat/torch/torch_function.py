"""Run torch's own operations on a tensor, without the overrides of its class or of modes."""

from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass

from lightning_paral.compat.private_name import PrivateName

__all__ = ["DisableTorchFunction", "DisableTorchFunctionSubclass"]

NAMES = (
    PrivateName(
        name="torch._C.DisableTorchFunctionSubclass",
        purpose="to run torch's own operations inside __torch_function__",
        reason="torch documents this class, but only in torch._C",
        seen="torch 2.11 to 2.13",
        upstream="https://docs.pytorch.org/docs/stable/notes/extending.html",
    ),
    PrivateName(
        name="torch._C.DisableTorchFunction",
        purpose="to run operations that our TorchFunctionMode must not intercept",
        reason="no function of torch.overrides disables modes as well as subclasses",
        seen="torch 2.11 to 2.13",
    ),
)
