"""The model states of a rank: parameters, gradients and optimizer states, without anything that a step adds.

Follows Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 3.1 and figure 1.
"""

from itertools import accumulate, pairwise

from lightning_paral.planning.layout import Layout
from lightning_paral.planning.memory.ledger import Item
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates


def model_state_bytes(layout: Layout, states: ModelStates, num_ranks: int, settings: StepSettings) -> dict[Item, float]:
    """Return the bytes of a rank by kind, wherever they are, while it has gradients.

    Padding of shards is left out. With 16-bit parameters, ZeRO's optimizer also has fp32 copies of them.

    Args:
        layout: the strategy.
        states: the states of the module, unsharded.
        num_ranks: the number of ranks.
        settings: the Trainer's settings.
    """
    parameters, gradients = states.parameter_bytes, states.gradient_bytes
    optimizer: float = states.optimizer_bytes
    is_low = settings.parameter_dtype is not None and settings.parameter_dtype.itemsize < 4
    if layout.engine == "zero" and is_low:
        optimizer = 4 * (states.num_trained + sum(state.optimizer_numel for state in states.parameters))
    shards_all = layout.engine == "fsdp" or layout.stage == 3
    if layout.stage == 2:
        gradients = largest_part(states, num_ranks)
    return {
        Item.PARAMETERS: parameters / (num_ranks if shards_all else 1),
        Item.GRADIENTS: gradients / (num_ranks if shards_all else 1),
        Item.OPTIMIZER: optimizer / (num_ranks if shards_all or layout.stage else 1),
    }


def largest_part(states: ModelStates, num_ranks: int) -> int:
    """Return the bytes of gradients of the rank that holds the most at stages 1 and 2.

    A rank owns an equal part of the flattened gradients, and holds all of each parameter that its part has elements of.
    """
    ends = list(accumulate((state.gradient_bytes for state in states.parameters), initial=0))
    part = ends[-1] / num_ranks
    return max(
        sum(last - first for first, last in pairwise(ends) if first < part * (rank + 1) and last > part * rank)
        for rank in range(num_ranks)
    )
