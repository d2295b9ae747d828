"""fp32 master weights at stages 1 and 2: this rank's flat range of each parameter, and its optimizer state."""

from typing import Any, NamedTuple

from lightning_paral.compat.private_name import PrivateName

_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"

NAMES = (
    PrivateName(
        name="deepspeed.utils.mixed_precision_linkage.link_hp_params._hp_mapping",
        purpose="to know which flat range of a parameter this rank updates, and where its master is",
        reason="the functions of deepspeed.utils for full parameters are collectives, and those for shards support "
        "only stage 3",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}._link_all_hp_params",
        purpose="to link parameters to their masters again after the optimizer's groups or their order have changed",
        reason="deepspeed.utils.link_hp_params needs the layout of the masters, which only this method knows",
        seen="deepspeed 0.19.8",
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_OPTIMIZER}.round_robin_bit16_padding",
        purpose="to make DeepSpeed link parameters to the right masters, by declaring that there is padding",
        reason="with round_robin_gradients and without padding, DeepSpeed expects masters in the wrong order, so it "
        "reads and saves those of different parameters",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}.round_robin_gradients",
        purpose="to know whether the masters are in a different order than the parameters",
        reason="DeepSpeed may ignore this option of the user's configuration",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}._hp_optimizer_states_linked",
        purpose="to make DeepSpeed link masters to the states that the next step creates",
        reason="DeepSpeed links them only once, but a loaded checkpoint replaces the states",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}.bit16_groups",
        purpose="to know which parameters share a flat master",
        reason="no public name lists them",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}.single_partition_of_fp32_groups",
        purpose="to read and write this rank's flat masters without a collective",
        reason="at these stages the functions of deepspeed.utils support full parameters only",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
)


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
