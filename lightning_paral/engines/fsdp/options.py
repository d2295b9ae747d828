"""The options of `ParalFSDPStrategy` that concern sharding, and their checks."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_paral.distributed.mesh import ParallelDims, check_divides
from lightning_paral.engines.fsdp.gradients import ReduceDtype
from lightning_paral.errors import ConfigurationError
from lightning_paral.option_types import Positive
from lightning_paral.options import ADVICE_ON_UNITS, RankOptions, UnitChoice, check_unit_choice
from lightning_paral.planning.layout import Layout, Place


@dataclass(frozen=True, kw_only=True)
class FSDPOptions(RankOptions):
    """The options of `ParalFSDPStrategy`.

    Args:
        units: the submodules to shard and unshard one at a time: `"auto"`, which finds repeated blocks; classes or
            their names; or a function that takes a submodule's dotted name and the submodule, and returns whether to
            choose it. All other parameters belong to the root, which stays unsharded during a step.
        replicate: hybrid sharding: the number of copies of the model, each sharded over world size / `replicate` ranks.
        reshard_after_forward: whether a unit is resharded between forward and backward. `None`: every unit but the
            root. `False` saves an all-gather but uses more memory. Under manual optimization it is always `True`.
        accumulate: in backward passes that accumulate, reduce-scatter gradients each time (`"sharded"`), or keep full
            gradients and reduce them once (`"unsharded"`), which costs memory but saves traffic. Replicas average
            gradients as often.
        offload: keep parameters, gradients and optimizer state in host memory, and run the optimizer on the CPU.
        reduce_dtype: the dtype in which gradients are reduced: `"fp32"`, `"bf16"` or `"fp16"`. `None`: fp32 under mixed
            precision, otherwise the dtype of the weights.
        broadcast_buffers: broadcast rank 0's buffers to all ranks, as DDP does: before the training step that begins an
            accumulation window, and at the start of validation.
        tensor_parallel: the number of ranks that compute each layer together: each has some of the features. `"node"`:
            all ranks of a node, and one copy of the model on each node. The other ranks shard, as without it.
        plan: with `tensor_parallel`, the layers to split: `"auto"`; or patterns of their names with a style for each:
            `{"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "vocab"}`. `paral plan --tensor-parallel`
            prints the layers that `"auto"` splits.
        sequence_parallel: with `tensor_parallel`, give each tensor rank some of the positions of activations between
            attention and feed-forward networks, where norms, dropout and residual connections act. It saves memory and
            sends as much. The ranks then have dropout masks of their own there.
        check_plan: with `tensor_parallel`, compare the loss and the gradients of two samples with those of the unsplit
            module before the first training step, and the results of the first step of each evaluation, unless one
            rank lacks memory for the whole module.

    Raises:
        ConfigurationError: an option has an invalid value, or options contradict each other.
    """

    units: UnitChoice = "auto"
    replicate: int = 1
    reshard_after_forward: bool | None = None
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    offload: bool = False
    reduce_dtype: ReduceDtype | None = None
    broadcast_buffers: bool = True
    tensor_parallel: Positive | Literal["node"] = 1
    plan: Literal["auto"] | dict[str, str] = "auto"
    sequence_parallel: bool = False
    check_plan: bool = True

    advice: ClassVar[dict[str, str]] = {
        **RankOptions.advice,
        **ADVICE_ON_UNITS,
        "auto_wrap_policy": "Use units=..., with classes, their names, or a function of name and module.",
        "activation_checkpointing_policy": "Use activation_checkpointing=ActivationCheckpointing(units=...).",
        "cpu_offload": "Use offload=True.",
        "mixed_precision": "Use Trainer(precision=...), and reduce_dtype=....",
        "sharding_strategy": "Use reshard_after_forward=False for SHARD_GRAD_OP, replicate=... for HYBRID_SHARD, and "
        "paral_ddp for NO_SHARD.",
        "device_mesh": "Use replicate=....",
        "state_dict_type": "Use checkpoint='full' or 'sharded'.",
        **dict.fromkeys(
            ("use_orig_params", "sync_module_states", "limit_all_gathers", "backward_prefetch"),
            "Leave it out: FSDP2 always does this.",
        ),
        "reshard_after_forward": "In place of a number of ranks, use replicate=..., or True.",
        "prefetch": "FSDP2 gathers ahead in backward passes. To gather ahead in forward passes as well, call "
        "set_modules_to_forward_prefetch of the units in on_fit_start.",
        "offload": "FSDP offloads to host memory: offload=True. For NVMe, use ParalZeROStrategy(stage=3, "
        "offload_optimizer=Offload('nvme', path=...)).",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unit_choice(self.units)
        self._check_tensor_parallel()

    @property
    def strategy_name(self) -> str:
        """The registered name that is closest to these options."""
        if self.tensor_parallel == "node":
            return "paral_tp"
        if self.tensor_parallel > 1:
            return "paral_fsdp_tp"
        return "paral_fsdp_offload" if self.offload else "paral_fsdp"

    @property
    def layout(self) -> Layout:
        """How a plan counts the strategy."""
        place: Place = "host" if self.offload else "device"
        return Layout(
            strategy=self.strategy_name,
            engine="fsdp",
            optimizer_place=place,
            parameter_place=place,
            replicas=self.replicate,
            reshards=self.reshard_after_forward is not False,
            tensor=None if self.tensor_parallel == "node" else self.tensor_parallel,
            recomputes=self.activation_checkpointing is not None,
        )

    def _check_tensor_parallel(self) -> None:
        if self.tensor_parallel == "node" and self.replicate != 1:
            raise ConfigurationError(
                f"tensor_parallel='node' holds one copy of the model on each node, so replicate={self.replicate} "
                "cannot be given as well. Leave replicate out, or give the number of ranks to tensor_parallel."
            )
        for name in ("plan", "sequence_parallel"):
            if self.tensor_parallel == 1 and getattr(self, name) not in ("auto", False):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} is about layers that are split, but tensor_parallel=1. Set "
                    "tensor_parallel to the number of ranks that compute each layer together, such as 2."
                )
        if self.tensor_parallel != 1 and self.offload:
            raise ConfigurationError(
                f"tensor_parallel={self.tensor_parallel!r} and offload=True cannot be combined. Leave one of them out."
            )

    def arrange(self, rank: int, world_size: int, ranks_per_node: int) -> ParallelDims:
        """Return the arrangement of `world_size` ranks; `check_world_size` has found that it is possible."""
        if self.tensor_parallel == "node":
            tensor, replicate = ranks_per_node, world_size // ranks_per_node
        else:
            tensor, replicate = self.tensor_parallel, self.replicate
        return ParallelDims(rank=rank, replicate=replicate, shard=world_size // (tensor * replicate), tensor=tensor)

    def check_world_size(self, world_size: int, ranks_per_node: int) -> None:
        """Raise a `ConfigurationError` if `world_size` ranks cannot be arranged as the options specify."""
        tensor = ranks_per_node if self.tensor_parallel == "node" else self.tensor_parallel
        check_divides(f"tensor_parallel={tensor}", tensor, world_size, "ranks", "1 splits no layers")
        if self.tensor_parallel == "node":
            return
        data_size, replicate = world_size // tensor, self.replicate
        groups = "ranks" if tensor == 1 else f"groups of tensor_parallel={tensor} ranks"
        check_divides(f"replicate={replicate}", replicate, data_size, groups, f"1 shards over all {groups}")
