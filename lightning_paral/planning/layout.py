"""The layouts that a plan compares: a strategy by name, and options that save memory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from lightning_paral.distributed.mesh import check_replicate
from lightning_paral.errors import ConfigurationError
from lightning_paral.suggestions import did_you_mean, nearest_names

Engine = Literal["dp", "ddp", "fsdp", "zero"]
Place = Literal["device", "host", "nvme"]
AllReduce = Literal["default", "ring", "reduce_broadcast", "all_to_all"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A strategy and where it keeps which state."""

    strategy: str
    """The name for `Trainer(strategy=...)`."""
    engine: Engine
    stage: int = 0
    """The stage of ZeRO; 0 for other engines."""
    optimizer_place: Place = "device"
    """Where optimizer states and the gradients for them are."""
    parameter_place: Place = "device"
    """Where shards of parameters are between their uses."""
    all_reduce: AllReduce = "default"
    recomputes: bool = False
    """Whether activations are recomputed: `activation_checkpointing=ActivationCheckpointing()`."""
    replicas: int = 1
    """Under FSDP, the number of copies of the model; each is sharded over an equal part of the ranks."""
    wire_itemsize: int | None = None
    """Under DDP, bytes per element of gradients on the wire; `None`: those of their dtype."""
    has_gradient_views: bool = False
    """Whether gradients are views into DDP's buckets, and take no memory beside them."""
    reshards: bool = True
    """Whether FSDP reshards units between forward and backward."""
    bucket_numel: int | None = None
    """Elements of a bucket of ZeRO; `None`: the default."""
    label: str = ""
    """What a plan calls the row of a strategy object; empty for the rows of registered strategies."""
    uncounted: tuple[str, ...] = ()
    """Options of the strategy object that a plan cannot count, such as `prefetch=2`."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a strategy object that a plan counts, besides those in the name of the strategy."""
        counted = {
            "replicate": self.replicas if self.replicas > 1 else None,
            "reshard_after_forward": None if self.reshards else False,
            "all_reduce": None if self.all_reduce in ("default", "ring") else self.all_reduce,
            "wire_dtype": None if self.wire_itemsize is None else f"{8 * self.wire_itemsize} bits",
            "gradient_as_bucket_view": self.has_gradient_views or None,
            "reduce_bucket_numel": self.bucket_numel,
            "offload_optimizer": self.optimizer_place if self.engine == "zero" and self.is_offloaded else None,
            "offload_parameters": self.parameter_place if self.engine == "zero" and self.is_offloaded else None,
            "activation_checkpointing": self.recomputes or None,
        }
        return tuple(f"{option}={value}" for option, value in counted.items() if value is not None)

    @property
    def name(self) -> str:
        """The label; without one, the strategy, and `+ recompute` if activations are recomputed."""
        if self.label:
            return self.label
        return f"{self.strategy} + recompute" if self.recomputes else self.strategy

    @property
    def is_offloaded(self) -> bool:
        """Whether some state is outside of the device."""
        return (self.optimizer_place, self.parameter_place) != ("device", "device")

    def recomputing(self) -> "Layout":
        """Return this layout with activation checkpointing."""
        return replace(self, recomputes=True)


LAYOUTS = (
    Layout(strategy="paral_dp", engine="dp"),
    Layout(strategy="paral_ddp", engine="ddp"),
    Layout(strategy="paral_ddp_ring", engine="ddp", all_reduce="ring"),
    Layout(strategy="paral_fsdp", engine="fsdp"),
    Layout(strategy="paral_fsdp_offload", engine="fsdp", optimizer_place="host", parameter_place="host"),
    Layout(strategy="paral_zero1", engine="zero", stage=1),
    Layout(strategy="paral_zero2", engine="zero", stage=2),
    Layout(strategy="paral_zero3", engine="zero", stage=3),
    Layout(strategy="paral_zero1_offload", engine="zero", stage=1, optimizer_place="host"),
    Layout(strategy="paral_zero2_offload", engine="zero", stage=2, optimizer_place="host"),
    Layout(strategy="paral_zero3_offload", engine="zero", stage=3, optimizer_place="host", parameter_place="host"),
    Layout(strategy="paral_zero3_nvme", engine="zero", stage=3, optimizer_place="nvme", parameter_place="nvme"),
)
"""One for each registered strategy that can be planned."""

NOT_PLANNED = {
    "paral_auto": "it becomes the strategy that a plan recommends",
    "paral_tp": "`paral plan --tensor-parallel` prints what each of its ranks has instead",
    "paral_fsdp_tp": "`paral plan --tensor-parallel` prints what each of its ranks has instead",
    "paral_pp": "its memory depends on how the layers divide among the stages, which a plan does not follow yet",
}
"""The other registered strategies, and why they are not planned."""


class HasLayout(Protocol):
    """A strategy that can be planned with its options."""

    @property
    def layout(self) -> Layout | None:
        """How a plan counts the strategy; `None` if it cannot."""


def layouts_of(strategies: Iterable[str | HasLayout | Layout] | None) -> tuple[Layout, ...]:
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
    num_objects = 0
    for strategy in strategies:
        if not isinstance(strategy, str):
            num_objects += 1
            label = "configured" if num_objects == 1 else f"configured {num_objects}"
            chosen.append(replace(_layout_of_object(strategy), label=label))
        elif strategy in known:
            chosen.append(known[strategy])
        else:
            if strategy in NOT_PLANNED:
                raise ConfigurationError(f"{strategy!r} cannot be planned: {NOT_PLANNED[strategy]}.")
            near = nearest_names(strategy, known)
            hint = did_you_mean(near, quoted=True) if near else f"The names are {', '.join(known)}."
            raise ConfigurationError(f"There is no strategy named {strategy!r} to plan for. {hint}")
    if not chosen:
        raise ConfigurationError("No strategies were given to plan for. Leave the option out to plan for all.")
    return tuple(chosen)


def _layout_of_object(strategy: HasLayout | Layout) -> Layout:
    layout = strategy if isinstance(strategy, Layout) else getattr(strategy, "layout", None)
    if not isinstance(layout, Layout):
        raise ConfigurationError(
            f"{type(strategy).__name__} cannot be planned: it has no layout. Give the name of a strategy, such as "
            "'paral_fsdp', or an object of one of lightning_paral's strategies other than ParalAutoStrategy and "
            "ParalPipelineStrategy, without tensor_parallel."
        )
    return layout


def rows_of(layout: Layout, *, recomputes: bool) -> tuple[Layout, ...]:
    """Return the rows of a plan for a layout: also one with recomputation, if its strategy has this option.

    The row of a strategy object stands for its own options alone.

    Args:
        layout: the layout.
        recomputes: whether the module has repeated blocks whose activations can be recomputed.
    """
    return (layout, layout.recomputing()) if recomputes and not layout.label and layout.engine != "dp" else (layout,)


def check_replicas(layouts: Iterable[Layout], world_size: int) -> None:
    """Raise a `ConfigurationError` if the ranks cannot be divided into the replicas of a layout."""
    for layout in layouts:
        check_replicate(layout.replicas, world_size)


def notes_on_objects(layouts: Iterable[Layout], *, recomputes: bool) -> tuple[str, ...]:
    """Return what the rows of strategy objects stand for, and which of their options are not counted.

    Args:
        layouts: the layouts of a plan.
        recomputes: whether the module has repeated blocks whose activations can be recomputed.
    """
    notes = []
    for layout in layouts:
        if layout.label:
            missing = list(layout.uncounted)
            if layout.recomputes and not recomputes:
                missing.append("activation_checkpointing, because its recomputation cannot be followed")
            options = "" if not layout.options else f" with {', '.join(layout.options)}"
            counted = "" if not missing else f" Not counted: {', '.join(missing)}."
            notes.append(f"The row {layout.name} is {layout.strategy}{options}.{counted}")
    return tuple(notes)
