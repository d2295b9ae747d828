"""The object through which Lightning's strategies run steps inside the `forward` of a wrapper."""

from lightning.pytorch.strategies.strategy import _ForwardRedirection as ForwardRedirection

from lightning_paral.compat.private_name import Names

__all__ = ["ForwardRedirection"]

NAMES: Names = {
    "lightning.pytorch.strategies.strategy._ForwardRedirection": {
        "__call__(wrapper_module, original_module, method_name)": "run DeepSpeed's hooks on the root once per step",
    },
}
