"""fp32 master weights at stages 1 and 2: the flat range of a parameter that each covers, and its optimizer state."""

from typing import Any, NamedTuple

from lightning_paral.compat.private_name import PrivateName

_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"

NAMES = (
    PrivateName(
        name="deepspeed.utils.mixed_precision_linkage.link_hp_params._hp_mapping",
        purpose="to know which flat range of a parameter this rank updates, and where its master is",
        reason="the functions of deepspeed.utils return full parameters, by a collective; those for shards support "
        "stage 3 only",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}._link_all_hp_params",
        purpose="to find masters again after their order or the optimizer's groups have changed",
        reason="deepspeed.utils.link_hp_params takes the layout, which only this method knows",
        seen="deepspeed 0.19.8",
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_OPTIMIZER}.round_robin_bit16_padding",
        purpose="to make DeepSpeed look for masters where they are, by declaring padding between them",
        reason="with round_robin_gradients DeepSpeed looks for them in the order of the parameters, not in their own, "
        "and would read and save those of other parameters",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}.round_robin_gradients",
        purpose="to know whether DeepSpeed looks for masters in another order than theirs",
        reason="the user's configuration may set it, and DeepSpeed may decline",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}._hp_optimizer_states_linked",
        purpose="to let DeepSpeed link masters to the states that the next step creates",
        reason="DeepSpeed links them once, and a checkpoint may have replaced the states since",
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
    """The flat range of a parameter that this rank updates, and where it begins in the flat master."""

    start: int
    numel: int
    position: int


def master_range_of(parameter: Any) -> MasterRange:
    """Return this rank's flat range of `parameter`, which may be empty."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return MasterRange(0, 0, 0)
    address = mapping.lp_fragment_address
    return MasterRange(address.start, address.numel, mapping.hp_fragment_address.start)


def relink_masters(optimizer: Any) -> None:
    """Find the masters again after the groups of the running optimizer have been replaced."""
    optimizer._link_all_hp_params()


def link_round_robin_masters(optimizer: Any) -> None:
    """Find the masters where `round_robin_gradients`, if it is on, has put them.

    DeepSpeed does so only if there is padding.
    """
    if not optimizer.round_robin_gradients:
        return
    padding = optimizer.round_robin_bit16_padding
    optimizer.round_robin_bit16_padding = [[True] for _ in padding]
    optimizer._link_all_hp_params()
    optimizer.round_robin_bit16_padding = padding


def link_states(optimizer: Any) -> None:
    """Let the functions of `deepspeed.utils` find the optimizer's current states."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        lazy_init_hp_params_optimizer_state(group, flat, optimizer.optimizer.state)


def link_states_of_next_step(optimizer: Any) -> None:
    """Let DeepSpeed find the states after the next step, which creates them."""
    optimizer._hp_optimizer_states_linked = False
