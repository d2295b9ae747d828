"""Run torch's own operations on a tensor, without the overrides of its class or of modes."""

from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass

from lightning_paral.compat.private_name import Names

__all__ = ["DisableTorchFunction", "DisableTorchFunctionSubclass"]

NAMES: Names = {
    "torch._C": {
        "DisableTorchFunctionSubclass": "run torch's own operations inside __torch_function__",
        "DisableTorchFunction": "run operations that our TorchFunctionMode must not intercept",
    },
}
