"""Divide the units of a module among the stages of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_paral.engines.pipeline.options import PipelineOptions
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.units import Units, as_tree, choose_units


def chain_of(root: Module, options: PipelineOptions) -> Units:
    """Return the units of `root` that form the chain, in the module's order, without those that contain others.

    Raises:
        ConfigurationError: no unit is found, or parameters are distributed already.
    """
    distributed = next((name for name, each in root.named_parameters() if isinstance(each, DTensor)), None)
    if distributed is not None:
        raise ConfigurationError(
            f"{distributed} is a DTensor already, but a pipeline divides the module itself. Leave out "
            "parallelize_module or fully_shard in configure_model, or use Lightning's ModelParallelStrategy."
        )
    chosen = choose_units(root, options.units)
    names = [unit.name for unit in chosen.inner]
    inner = tuple(unit for unit in chosen.inner if not any(name.startswith(f"{unit.name}.") for name in names))
    if not inner:
        raise ConfigurationError(
            f"No repeated blocks were found in {type(root).__name__}. Name the classes of its layers: units=['Block']."
        )
    inside = {parameter for unit in inner for parameter in unit.parameters}
    outside = tuple(parameter for parameter in root.parameters() if parameter not in inside)
    return Units(inner=inner, root=replace(chosen.root, parameters=outside))


@dataclass(frozen=True)
class End:
    """A module that one stage holds, at an end of the chain."""

    name: str
    """The dotted name from the root."""
    module: Module
    option: str
    """The option that names it: `"first_stage"` or `"last_stage"`."""
    stage: int
    """The stage that holds it: the first or the last one."""


def ends_of(units: Units, options: PipelineOptions, num_stages: int) -> list[End]:
    """Return the modules that the options name, and check that their parameters can be on one stage.

    Args:
        units: the units of the chain.
        options: the options, of which `first_stage` and `last_stage` give dotted names.
        num_stages: the number of stages.

    Raises:
        ConfigurationError: a name is that of no submodule, or of one that overlaps with a unit or another of them; or a
            parameter is also outside of the submodule.
    """
    root = units.root.module
    modules = dict(root.named_modules())
    named = [("first_stage", 0, name) for name in options.first_stage]
    named += [("last_stage", num_stages - 1, name) for name in options.last_stage]
    taken = {unit.name: f"the unit {unit.name!r}" for unit in units.inner}
    for option, _, name in named:
        if not name or name not in modules:
            raise ConfigurationError(
                f"{option} names {name!r}, but {type(root).__name__} has no such submodule. Give dotted names, as in "
                "named_modules()."
            )
        for other, what in taken.items():
            if f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                raise ConfigurationError(
                    f"{option} names {name!r}, which overlaps with {what}. Name modules outside of units, each once."
                )
        taken[name] = f"{name!r} of {option}"
        inside, own = set(modules[name].modules()), set(modules[name].parameters())
        outside = [(prefix, part) for prefix, part in modules.items() if part not in inside]
        for path, parameter in (pair for prefix, part in outside for pair in part.named_parameters(prefix, False)):
            if parameter in own:
                raise ConfigurationError(
                    f"{option} names {name!r}, of which a parameter is also {path!r}, outside of it, which other "
                    f"stages may use. Leave {name!r} out of {option}, so that all stages have it."
                )
    return [End(name, modules[name], option, stage) for option, stage, name in named]


@dataclass(frozen=True)
class Division:
    """A chain of units that is divided among stages."""

    units: Units
    """The units of the chain, and the root."""
    num_stages: int
    """The number of stages."""
    parts: Sequence[range]
    """The positions of the units of each part in `units.inner`. With S stages, part p is on stage p modulo S."""
    ends: Sequence[End]
    """The modules outside of the chain that one stage holds."""

    def parts_of(self, stage: int) -> range:
        """Return the numbers of the parts of a stage."""
        return range(stage, len(self.parts), self.num_stages)

    @property
    def placed(self) -> list[tuple[Module, int]]:
        """The modules that one stage holds, each with its stage: the units in their order, and then the ends."""
        stages = [number % self.num_stages for number, part in enumerate(self.parts) for _ in part]
        of_units = [(unit.module, stage) for unit, stage in zip(self.units.inner, stages, strict=True)]
        return of_units + [(end.module, end.stage) for end in self.ends]

    @property
    def num_bytes(self) -> int:
        """The size of all parameters."""
        return sum(unit.num_bytes for unit in (*self.units.inner, self.units.root))

    def __str__(self) -> str:
        line = f"Pipeline: {' + '.join(str(len(part)) for part in self.parts)} units on {self.num_stages} stages"
        for end in self.ends:
            line += f", {end.name} on the {end.option.removesuffix('_stage')}"
        return f"{line}\n{as_tree(self.units)}"


def divide(root: Module, options: PipelineOptions, num_stages: int) -> Division:
    """Divide the units of `root` among the stages.

    Args:
        root: the module.
        options: the options, of which `balance` says how to divide.
        num_stages: the number of stages.

    Raises:
        ConfigurationError: there is no chain of units, there are fewer units than stages, or an option does not fit.
    """
    units = chain_of(root, options)
    num_units, num_parts = len(units.inner), num_stages * options.parts_per_stage if num_stages > 1 else 1
    if num_units < num_parts:
        names = ", ".join(unit.name for unit in units.inner)
        raise ConfigurationError(
            f"{num_stages} stages need at least {num_parts} units, but {type(root).__name__} has {num_units}: {names}. "
            "Choose fewer stages, or smaller units with units=[...]."
        )
    ends = ends_of(units, options, num_stages)
    if isinstance(options.balance, str) or num_parts == 1:
        sizes = [unit.num_params for unit in units.inner]
        for end in ends:
            place = 0 if end.option == "first_stage" else -1
            sizes[place] += sum(each.numel() for each in end.module.parameters())
        return Division(units, num_stages, balanced(sizes, num_parts), ends)
    if sum(options.balance) != num_units:
        raise ConfigurationError(
            f"balance={list(options.balance)!r} has {sum(options.balance)} units, but {type(root).__name__} has "
            f"{num_units}. Its numbers must add up to {num_units}."
        )
    stops = list(accumulate(options.balance))
    return Division(units, num_stages, [range(start, stop) for start, stop in pairwise([0, *stops])], ends)


def balanced(costs: Sequence[float], num_parts: int) -> list[range]:
    """Divide `costs` into consecutive parts, none of them empty, so that the largest sum is as small as possible.

    Of several such divisions, return one whose first parts have as many elements as possible.
    """
    total = [0.0, *accumulate(costs)]

    @cache
    def best(stop: int, parts: int) -> tuple[float, int]:
        """Return the largest sum of the best division of `costs[:stop]`, and minus the start of its last part."""
        if parts == 1:
            return total[stop], 0
        starts = range(parts - 1, stop)
        return min((max(best(start, parts - 1)[0], total[stop] - total[start]), -start) for start in starts)

    stops = [len(costs)]
    for parts in range(num_parts, 0, -1):
        stops.insert(0, -best(stops[0], parts)[1])
    return [range(start, stop) for start, stop in pairwise(stops)]
