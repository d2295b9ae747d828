"""fp32 master weights: this rank's flat range of each parameter, its optimizer state, and what they share memory with.

Except for `share_masters`, all of this is for stages 1 and 2.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.deepspeed.offload import is_offloaded
from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "deepspeed.utils.mixed_precision_linkage.link_hp_params": {
        "._hp_mapping": "know which flat range of a parameter this rank updates, and where its master is",
    },
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        "_link_all_hp_params": "link parameters to their masters again after the optimizer's groups have changed",
        ".round_robin_bit16_padding": "link parameters to the right masters, by declaring that there is padding",
        ".round_robin_gradients": "know whether the masters are in a different order than the parameters",
        "._hp_optimizer_states_linked": "make DeepSpeed link masters to the states that the next step creates",
        ".bit16_groups": "know which parameters share a flat master",
        ".single_partition_of_fp32_groups": "read and write this rank's flat masters without a collective",
        ".parallel_partitioned_bit16_groups": "let fp32 masters share the memory of fp32 weights",
        ".real_dp_process_group": "let fp32 masters share the memory of fp32 weights",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        ".fp16_partitioned_groups_flat": "let fp32 masters share the memory of fp32 weights",
    },
}


class MasterRange(NamedTuple):
    """The flat range of a parameter that this rank updates."""

    start: int
    """The offset of the range in the flattened parameter."""
    numel: int
    position: int
    """The offset of the range in the flat master."""


def master_range_of(parameter: Any) -> MasterRange:
    """Return this rank's flat range of `parameter`, which may be empty."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return MasterRange(0, 0, 0)
    address = mapping.lp_fragment_address
    return MasterRange(address.start, address.numel, mapping.hp_fragment_address.start)


def share_masters(optimizer: Any, stage: int) -> None:
    """Let the masters of `optimizer` share the memory of the weights that they are equal to: fp32 weights.

    Saves 4 bytes per element of this rank's shard. DeepSpeed copies masters to weights after a step, which then changes
    nothing. Masters on another device than the weights, and those of an offloaded optimizer, stay apart.
    """
    if is_offloaded(optimizer, stage):
        return
    shared = False
    for master, weights in _masters_and_weights(optimizer, stage):
        kind = (master.dtype, master.device, master.shape)
        if weights is not None and (weights.dtype, weights.device, weights.shape) == kind:
            master.data = weights.detach()
            shared = True
    if shared and stage < 3:
        relink_masters(optimizer)


def _masters_and_weights(optimizer: Any, stage: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield each flat master, and the flat weights with the same elements; `None` if they are on NVMe."""
    if stage == 3:
        yield from zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True)
        return
    shards = zip(optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True)
    weights = [by_rank[dist.get_rank(group)] for by_rank, group in shards]
    yield from zip(optimizer.single_partition_of_fp32_groups, weights, strict=True)


def relink_masters(optimizer: Any) -> None:
    """Link parameters to their masters again after the groups of `optimizer` have been replaced."""
    optimizer._link_all_hp_params()


def link_round_robin_masters(optimizer: Any) -> None:
    """Link parameters to their masters in the order of `round_robin_gradients`, if that option is on.

    DeepSpeed uses this order only if there is padding, so padding is declared while it links them.
    """
    if not optimizer.round_robin_gradients:
        return
    padding = optimizer.round_robin_bit16_padding
    optimizer.round_robin_bit16_padding = [[True] for _ in padding]
    optimizer._link_all_hp_params()
    optimizer.round_robin_bit16_padding = padding


def link_states(optimizer: Any) -> None:
    """Link masters to the optimizer's current states, so that the functions of `deepspeed.utils` find them."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        lazy_init_hp_params_optimizer_state(group, flat, optimizer.optimizer.state)


def link_states_of_next_step(optimizer: Any) -> None:
    """Make DeepSpeed link masters to their states after the next step, which creates the states."""
    optimizer._hp_optimizer_states_linked = False
