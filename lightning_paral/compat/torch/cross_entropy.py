"""What a cross entropy divides by."""

from typing import Any

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch._C._functions.NllLossBackward0": {
        "_saved_total_weight": "weigh the losses of micro-batches by the targets that they do not ignore",
        "_saved_reduction": "weigh the losses of micro-batches by the targets that they do not ignore",
    },
    "torch._C._functions.NllLoss2DBackward0": {
        "_saved_total_weight": "weigh the losses of micro-batches by the targets that they do not ignore",
        "_saved_reduction": "weigh the losses of micro-batches by the targets that they do not ignore",
    },
}
_MEAN = 1
_NUM_NODES = 32


def divisor_of(loss: Any) -> Any:
    """Return what the cross entropy, or `nll_loss`, that `loss` was computed from has divided its sum by.

    It is one with `reduction="mean"`. Of the graph, the nodes next to `loss` are searched, and the first one counts.

    Returns:
        The number of targets that are not ignored, or the sum of their class weights: a 0-dimensional tensor on the
        device of the loss. `None` if there is no cross entropy.
    """
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        if getattr(node, "_saved_reduction", None) == _MEAN and hasattr(node, "_saved_total_weight"):
            return node._saved_total_weight
        if len(nodes) < _NUM_NODES:
            nodes += [following for following, _ in getattr(node, "next_functions", ())]
    return None
