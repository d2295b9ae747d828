"""The object through which Lightning's strategies run steps inside the `forward` of a wrapper."""

from lightning.pytorch.strategies.strategy import _ForwardRedirection as ForwardRedirection

from lightning_paral.compat.private_name import PrivateName

__all__ = ["ForwardRedirection"]

NAMES = (
    PrivateName(
        name="lightning.pytorch.strategies.strategy._ForwardRedirection.__call__",
        parameters=("wrapper_module", "original_module", "method_name"),
        purpose="to let DeepSpeed's hooks on the root module run once per step",
        reason="strategies have no public way to run a step through a wrapper",
        seen="lightning 2.6.1 to 2.6.6",
    ),
)
