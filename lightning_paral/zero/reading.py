"""Whole tensors of which every rank holds a part, for hooks of the user's. *Collective*, all of them."""

from torch import Tensor
from torch.nn import Parameter


def read_parameter(parameter: Parameter, has_master: bool) -> Tensor:
    """Return a copy of `parameter` in its own shape, in fp32 if it `has_master`, a copy in the optimizer."""
    import deepspeed

    if has_master and parameter.requires_grad:
        full: Tensor | None = deepspeed.utils.safe_get_full_fp32_param(parameter)
        if full is not None:
            return full.detach().clone()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def read_optimizer_state(parameter: Parameter, key: str) -> Tensor:
    """Return the optimizer's state `key` (`"exp_avg"`) of `parameter`, in its shape.

    Raises:
        ValueError: there is no such state yet; states come with the first step.
    """
    import deepspeed

    try:
        state: Tensor | None = deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
    except (KeyError, TypeError, AttributeError):
        state = None
    if state is None:
        raise ValueError(f"The optimizer has no state {key!r} for this parameter, or not before its first step.")
    return state
