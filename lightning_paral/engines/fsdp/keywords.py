"""The keywords of `ParalFSDPStrategy`, with their documentation."""

from dataclasses import fields
from typing import Literal

from lightning_paral.engines.fsdp.options import FSDPOptions
from lightning_paral.engines.fsdp.precision import ReduceDtype
from lightning_paral.options import RankOptions, UnitChoice, takes_options


class FSDPKeywords(RankOptions, total=False):
    """The keywords of `ParalFSDPStrategy`: those of FSDP, and those of `RankOptions`.

    Args:
        units: the submodules to shard and unshard one at a time: `"auto"`, which finds repeated blocks; classes or
            their names; or a function that takes a submodule's dotted name and the submodule, and returns whether to
            choose it. All other parameters belong to the root, which stays unsharded during a step.
        min_params: instead of `units`, the smallest submodules with at least this number of parameters.
        replicate: hybrid sharding: the number of copies of the model, each sharded over world size / `replicate` ranks.
        reshard_after_forward: whether a unit is resharded between forward and backward. `None`: every unit but the
            root. `False` saves an all-gather but uses more memory. A number: reshard over this number of ranks.
        accumulate: in backward passes that accumulate, reduce-scatter gradients each time (`"sharded"`), or keep full
            gradients and reduce them once (`"unsharded"`), which costs memory but saves traffic. Gradients are averaged
            over the replicas once in both cases.
        prefetch: the number of units that are unsharded ahead of use, in forward and backward. `None`: FSDP2's default.
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
            module before the first training step, unless one rank lacks memory for the whole module.
    """

    units: UnitChoice
    min_params: int | None
    replicate: int
    reshard_after_forward: bool | int | None
    accumulate: Literal["sharded", "unsharded"]
    prefetch: int | None
    offload: bool
    reduce_dtype: ReduceDtype | None
    broadcast_buffers: bool
    tensor_parallel: int | Literal["node"]
    plan: Literal["auto"] | dict[str, str]
    sequence_parallel: bool
    check_plan: bool


takes_fsdp_options = takes_options(FSDPKeywords, {field.name: field.default for field in fields(FSDPOptions)})
"""Decorate a constructor that takes `**keywords: Unpack[FSDPKeywords]`: its signature lists each of them by name."""
