"""fp32 master weights at stages 1 and 2: which run of a parameter they are of, and which state belongs to them."""

from typing import Any, NamedTuple

from lightning_paral.compat.private_name import PrivateName

_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"

NAMES = (
    PrivateName(
        name="deepspeed.utils.mixed_precision_linkage.link_hp_params._hp_mapping",
        purpose="to know which run of a parameter this rank updates, and where its master lies",
        reason="the functions of deepspeed.utils return whole parameters, by a collective; those of local parts know "
        "stage 3 only",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}._link_all_hp_params",
        purpose="to find masters again where DeepSpeed has changed their order or their optimizer's groups",
        reason="deepspeed.utils.link_hp_params wants the layout, which only this method knows",
        seen="deepspeed 0.19.8",
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_OPTIMIZER}.round_robin_bit16_padding",
        purpose="to let masters be looked for where they lie, by saying that there is padding between them",
        reason="with round_robin_gradients DeepSpeed looks for them in the parameters' order, not in theirs: it would "
        "read and save those of others",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}._hp_optimizer_states_linked",
        purpose="to let DeepSpeed link masters to the states that the next step makes",
        reason="it does so once, and a checkpoint may have replaced the states since",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}.bit16_groups",
        purpose="to know which parameters share a flat master",
        reason="nothing public lists them",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
    PrivateName(
        name=f"{_OPTIMIZER}.single_partition_of_fp32_groups",
        purpose="to read and write this rank's flat masters without a collective",
        reason="the functions of deepspeed.utils know whole parameters at these stages",
        seen="deepspeed 0.19.8",
        on_instances=True,
    ),
)


class MasterRun(NamedTuple):
    """The run of a flattened parameter that this rank updates, and where it begins in the flat master."""

    start: int
    numel: int
    position: int


def master_run_of(parameter: Any) -> MasterRun:
    """Return this rank's run of `parameter`, which may be empty."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return MasterRun(0, 0, 0)
    address = mapping.lp_fragment_address
    return MasterRun(address.start, address.numel, mapping.hp_fragment_address.start)


def find_masters_again(optimizer: Any) -> None:
    """Look for masters anew after the groups of the optimizer that runs were replaced."""
    optimizer._link_all_hp_params()


def find_masters_in_round_robin(optimizer: Any) -> None:
    """Look for masters where `round_robin_gradients` has put them: DeepSpeed does so only where padding is."""
    padding = optimizer.round_robin_bit16_padding
    optimizer.round_robin_bit16_padding = [[True] for _ in padding]
    optimizer._link_all_hp_params()
    optimizer.round_robin_bit16_padding = padding


def link_states(optimizer: Any) -> None:
    """Let the functions of `deepspeed.utils` find the states that the optimizer has now."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
        lazy_init_hp_params_optimizer_state(group, flat, optimizer.optimizer.state)


def link_states_of_next_step(optimizer: Any) -> None:
    """Let DeepSpeed look for states after the next step, which makes them."""
    optimizer._hp_optimizer_states_linked = False
