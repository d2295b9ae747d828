"""Memory of engines that keep a full replica on each device: DP and DDP."""

from lightning_paral.planning.layout import Layout
from lightning_paral.planning.memory.ledger import Item, Ledger, RankMemory
from lightning_paral.planning.states import ModelStates
from lightning_paral.planning.timeline import Kind, Timeline

_BUCKET_BYTES = 25 * 2**20


def ddp_memory(timeline: Timeline, states: ModelStates, num_ranks: int, layout: Layout) -> RankMemory:
    """Return the memory of a rank under DDP.

    The reducer keeps buckets as large as all gradients. Gradients are beside them, or views into them. Our all-reduces
    receive a chunk of a bucket; the backend's needs two copies of a bucket if its elements are narrower on the wire.
    """
    ledger = _with_states(states, timeline)
    if not layout.has_gradient_views:
        ledger.add(Item.COMMUNICATION, states.gradient_bytes)
    bucket = min(_BUCKET_BYTES, states.gradient_bytes)
    if num_ranks == 1:
        scratch = 0.0
    elif layout.all_reduce != "default":
        scratch = bucket / num_ranks
    elif layout.wire_itemsize is not None:
        scratch = 2 * bucket * layout.wire_itemsize * states.num_trained / max(1, states.gradient_bytes)
    else:
        scratch = 0.0
    _follow(timeline, ledger, scratch=scratch, has_gradient_views=layout.has_gradient_views)
    return ledger.result()


def dp_memory(timeline: Timeline, states: ModelStates, num_devices: int, *, devices_are_one: bool) -> RankMemory:
    """Return the memory of the first device under DP.

    Args:
        timeline: a step with the part of one device, of the batch that the loader yields.
        states: the states of the module.
        num_devices: the number of devices with a replica.
        devices_are_one: whether the replicas are in the same memory, as on CPU.
    """
    ledger = _with_states(states, timeline)
    others = num_devices - 1
    ledger.add(Item.ACTIVATIONS, others * timeline.initial_bytes)  # the first device has the full batch
    if not devices_are_one:
        ledger.add(Item.COMMUNICATION, min(1, others) * states.gradient_bytes)  # received, before it is added
        _follow(timeline, ledger)
        return ledger.result()
    ledger.add(Item.ACTIVATIONS, others * timeline.initial_bytes)  # copies of the parts
    replicas = others * (states.parameter_bytes + states.buffer_bytes)
    ledger.add(Item.COMMUNICATION, replicas)
    for moment in timeline.moments:
        if moment.kind in (Kind.ACTIVATION, Kind.CAST):
            ledger.add(Item.ACTIVATIONS, num_devices * moment.size)
        elif moment.kind is Kind.GRADIENT:  # those of the replicas are kept until all are complete
            ledger.add(Item.GRADIENTS, moment.size * (num_devices if moment.size > 0 else 1))
        elif moment.kind is Kind.OPTIMIZER and replicas:
            if num_devices > 2:
                ledger.pulse(Item.GRADIENTS, states.gradient_bytes)  # the sums
            ledger.add(Item.GRADIENTS, -others * states.gradient_bytes)
            ledger.add(Item.COMMUNICATION, -replicas)
            replicas = 0
        elif moment.kind is Kind.TEMPORARY:
            ledger.add(Item.ACTIVATIONS, moment.size)
    return ledger.result()


def _with_states(states: ModelStates, timeline: Timeline) -> Ledger:
    ledger = Ledger()
    ledger.add(Item.PARAMETERS, states.parameter_bytes)
    ledger.add(Item.OPTIMIZER, states.optimizer_bytes)
    ledger.add(Item.GRADIENTS, states.gradient_bytes)
    ledger.add(Item.ACTIVATIONS, states.buffer_bytes + timeline.initial_bytes)
    return ledger


def _follow(timeline: Timeline, ledger: Ledger, *, scratch: float = 0.0, has_gradient_views: bool = False) -> None:
    """Follow a step.

    Args:
        timeline: the step.
        ledger: has what exists before the step.
        scratch: bytes that the reduction of the last bucket takes.
        has_gradient_views: whether gradients exist all the time, as views into buckets.
    """
    for moment in timeline.moments:
        if moment.kind in (Kind.ACTIVATION, Kind.CAST) or moment.kind is Kind.TEMPORARY:
            ledger.add(Item.ACTIVATIONS, moment.size)
        elif moment.kind is Kind.GRADIENT and not has_gradient_views:
            ledger.add(Item.GRADIENTS, moment.size)
        elif moment.kind is Kind.OPTIMIZER:
            ledger.pulse(Item.COMMUNICATION, scratch)
