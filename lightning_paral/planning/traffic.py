"""Bytes that a rank sends in an optimizer step."""

from lightning_paral.planning.layout import Layout
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates


def wire_bytes(layout: Layout, states: ModelStates, num_ranks: int, settings: StepSettings, *, on_cpu: bool) -> int:
    """Return the bytes that a rank sends to others in an optimizer step.

    An all-reduce of n bytes sends 2 n (N-1)/N, an all-gather or reduce-scatter n (N-1)/N (Rajbhandari et al., "ZeRO",
    arXiv:1910.02054, section 7). FSDP and ZeRO-3 gather the parameters twice, in forward and backward. Replicas of
    FSDP all-reduce their shards of the gradients once. With an all-to-all, each rank sends all its gradients to each
    other rank; with reduce and broadcast, the root does, which sends the most. At stages 1 and 2, DeepSpeed reduces
    gradients by an all-reduce on NCCL, and this package directly to their owners on gloo.

    Args:
        layout: the strategy. DP sends nothing: its devices belong to one process.
        states: the states of the module.
        num_ranks: the number of ranks N.
        settings: with mixed precision, FSDP gathers 16 bits per parameter.
        on_cpu: whether the backend is gloo.
    """
    if layout.engine == "dp" or num_ranks == 1:
        return 0
    share = (num_ranks - 1) / num_ranks
    gradients, parameters = states.gradient_bytes, states.parameter_bytes
    if layout.engine == "ddp":
        return round(_sent_by_ddp(layout, states, num_ranks))
    if layout.engine == "fsdp":
        gathered = (parameters / 2 if settings.is_mixed else parameters) * (2 if layout.reshards else 1)
        shards = num_ranks // layout.replicas
        sent = (gathered + gradients) * (shards - 1) / shards * settings.accumulate
        return round(sent + 2 * gradients / shards * (layout.replicas - 1) / layout.replicas)
    if layout.stage == 3:
        return round((2 * parameters + gradients) * share * settings.accumulate)
    reductions = settings.accumulate if layout.stage == 2 else 1
    return round((gradients * reductions * (1 if on_cpu else 2) + gradients) * share)


def _sent_by_ddp(layout: Layout, states: ModelStates, num_ranks: int) -> float:
    gradients = states.gradient_bytes
    if layout.wire_itemsize is not None:
        trained = [state for state in states.parameters if state.is_trained]
        gradients = sum(state.numel * min(state.dtype.itemsize, layout.wire_itemsize) for state in trained)
    if layout.all_reduce in ("all_to_all", "reduce_broadcast"):
        return gradients * (num_ranks - 1)
    return 2 * gradients * (num_ranks - 1) / num_ranks
