"""Memory of a rank until the first step, where it may need more than in a step: on CPU, with sharded parameters."""

from lightning_paral.planning.layout import Layout
from lightning_paral.planning.memory.ledger import Item, RankMemory
from lightning_paral.planning.states import ModelStates


def construction_memory(layout: Layout, states: ModelStates, num_ranks: int, *, on_cpu: bool) -> RankMemory:
    """Return the memory of a rank at the peak of construction; nothing where a step always needs more.

    Every rank holds all parameters that are built before `configure_model`, until they are sharded one by one. Those
    that are built in `configure_model` are sharded as they are built. ZeRO-3 then copies its shards into one tensor
    beside them, and allocates one of the same size for gradients.

    Args:
        layout: the strategy.
        states: the states of the module, unsharded.
        num_ranks: the number of ranks.
        on_cpu: whether the device is the CPU. Otherwise modules are built in host memory, not on the device.
    """
    by_item = dict.fromkeys(Item, 0)
    shards_parameters = layout.engine == "fsdp" or layout.stage == 3
    if on_cpu and shards_parameters and "nvme" not in (layout.optimizer_place, layout.parameter_place):
        shard = states.parameter_bytes // num_ranks
        largest = max((state.num_bytes for state in states.parameters), default=0)
        building = states.early_bytes + max(largest // num_ranks, shard - states.early_bytes // num_ranks)
        flattening = 2 * shard if layout.stage == 3 else 0
        if shard + flattening > building:
            by_item |= {Item.PARAMETERS: shard + flattening // 2, Item.GRADIENTS: flattening // 2}
        else:
            by_item[Item.PARAMETERS] = building
    return RankMemory(by_item=by_item)
