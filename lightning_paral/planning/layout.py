"""What a plan knows of a strategy: its engine, and where it keeps which state."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_paral.errors import ConfigurationError
from lightning_paral.text import did_you_mean, nearest_names

Engine = Literal["ddp", "fsdp", "zero", "pipeline"]
Place = Literal["device", "host", "nvme"]
RANKS_PER_NODE = 8
"""The tensor ranks that `paral_tp` has at most, when it is planned for more ranks than these."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A strategy, and where it keeps which state: its options that a plan counts."""

    strategy: str
    """The name for `Trainer(strategy=...)`."""
    engine: Engine
    stage: int = 0
    """The stage of ZeRO; 0 for other engines."""
    optimizer_place: Place = "device"
    """Where optimizer states and the gradients for them are."""
    parameter_place: Place = "device"
    """Where shards of parameters are between their uses."""
    replicas: int = 1
    """Under FSDP, the number of copies of the model; each is sharded over an equal part of the ranks."""
    reshards: bool = True
    """Whether FSDP reshards units between forward and backward."""
    tensor: int | None = 1
    """Under FSDP and in a pipeline, the number of tensor ranks; `None`: all of a node."""
    stages: int | None = None
    """The number of stages of a pipeline; `None`: one per rank, or per group of tensor ranks."""
    micro_batches: int | None = None
    """Into how many parts a pipeline divides a batch; `None`: four per stage."""
    period: int = 1
    """Under local SGD, the number of steps between two exchanges."""
    parts_per_stage: int = 1
    """The number of parts of the chain that each stage of a pipeline has."""
    recomputes: bool = False
    """Whether activations are recomputed: `activation_checkpointing=ActivationCheckpointing()`."""
    label: str = ""
    """What a plan calls the row of a strategy object; empty for the rows of registered strategies."""

    @property
    def name(self) -> str:
        """The label; without one, the strategy, and `+ recompute` if activations are recomputed."""
        return self.label or (f"{self.strategy} + recompute" if self.recomputes else self.strategy)

    @property
    def distance(self) -> int:
        """How far the farthest state is: 0 on the device, 1 in host memory, 2 on NVMe."""
        places: tuple[Place, ...] = ("device", "host", "nvme")
        return max(places.index(self.optimizer_place), places.index(self.parameter_place))

    def tensor_ranks(self, num_ranks: int) -> int:
        """Return over how many of `num_ranks` ranks each layer is split."""
        if self.tensor is not None:
            return self.tensor
        return num_ranks if num_ranks % RANKS_PER_NODE else RANKS_PER_NODE

    def num_stages(self, num_ranks: int) -> int:
        """Return the number of stages of a pipeline on `num_ranks` ranks."""
        return self.stages or num_ranks // self.tensor_ranks(num_ranks)

    def objection(self, num_ranks: int, num_units: int) -> str | None:
        """Return why `num_ranks` ranks cannot train a module of `num_units` units in this way; `None` if they can."""
        parts = {"replicate": self.replicas, "stages": self.stages or 1, "tensor_parallel": self.tensor or 1}
        if num_ranks % math.prod(parts.values()):
            given = " x ".join(f"{option}={number}" for option, number in parts.items() if number > 1)
            return f"{given} does not divide the {num_ranks} ranks of the plan"
        stages = self.num_stages(num_ranks)
        needed = stages * self.parts_per_stage if stages > 1 else 1
        if self.engine == "pipeline" and num_units < needed:
            return f"{needed} parts of stages need at least as many repeated blocks, but the module has {num_units}"
        return None


LAYOUTS = (
    Layout(strategy="paral_ddp", engine="ddp"),
    Layout(strategy="paral_ddp_ring", engine="ddp"),
    Layout(strategy="paral_fsdp", engine="fsdp"),
    Layout(strategy="paral_fsdp_offload", engine="fsdp", optimizer_place="host", parameter_place="host"),
    Layout(strategy="paral_zero1", engine="zero", stage=1),
    Layout(strategy="paral_zero2", engine="zero", stage=2),
    Layout(strategy="paral_zero3", engine="zero", stage=3),
    Layout(strategy="paral_zero1_offload", engine="zero", stage=1, optimizer_place="host"),
    Layout(strategy="paral_zero2_offload", engine="zero", stage=2, optimizer_place="host"),
    Layout(strategy="paral_zero3_offload", engine="zero", stage=3, optimizer_place="host", parameter_place="host"),
    Layout(strategy="paral_zero3_nvme", engine="zero", stage=3, optimizer_place="nvme", parameter_place="nvme"),
    Layout(strategy="paral_tp", engine="fsdp", tensor=None),
    Layout(strategy="paral_fsdp_tp", engine="fsdp", tensor=2),
    Layout(strategy="paral_pp", engine="pipeline"),
    Layout(strategy="paral_pp_tp", engine="pipeline", tensor=2),
    Layout(strategy="paral_local_sgd", engine="ddp"),
    Layout(strategy="paral_diloco", engine="ddp"),
)
"""One for each registered strategy but `paral_auto`, which becomes one of them, and `paral_dp`, which needs what DDP
needs. Local SGD is planned for period 1."""


def layouts_of(strategies: Iterable[Any] | None) -> tuple[Layout, ...]:
    """Return the layouts of strategies.

    Args:
        strategies: names; and objects or their layouts, whose rows are labelled `configured`. `None`: all names.

    Raises:
        ConfigurationError: a name is unknown, or an object cannot be planned.
    """
    if strategies is None:
        return LAYOUTS
    known = {layout.strategy: layout for layout in LAYOUTS}
    chosen: list[Layout] = []
    for strategy in strategies:
        if isinstance(strategy, str):
            if strategy not in known:
                hint = did_you_mean(nearest_names(strategy, known), quoted=True) or f"Plan for {', '.join(known)}."
                raise ConfigurationError(f"There is no strategy named {strategy!r} to plan for. {hint}")
            chosen.append(known[strategy])
            continue
        layout = strategy if isinstance(strategy, Layout) else getattr(strategy, "layout", None)
        if layout is None:
            raise ConfigurationError(
                f"{type(strategy).__name__} cannot be planned. Give the name of a strategy, such as 'paral_fsdp', or "
                "an object of one of lightning_paral's strategies other than ParalAutoStrategy and ParalDPStrategy."
            )
        number = 1 + sum(bool(each.label) for each in chosen)
        chosen.append(replace(layout, label="configured" if number == 1 else f"configured {number}"))
    return tuple(chosen)
