"""Units: submodules whose parameters are sharded and gathered together. The root unit has the remaining parameters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from torch.nn import Module, ModuleList, Parameter, Sequential

from lightning_paral.errors import ConfigurationError
from lightning_paral.options import UnitChoice
from lightning_paral.text import format_bytes


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A submodule and the parameters that are unsharded with it."""

    name: str
    """The dotted name from the root; empty for the root."""
    module: Module
    parameters: tuple[Parameter, ...]
    """Without duplicates, and without the parameters of units inside this one."""

    @property
    def num_params(self) -> int:
        """The number of elements in `parameters`."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def num_bytes(self) -> int:
        """The size of `parameters` in bytes, unsharded."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class Units:
    """A module divided into units: every parameter is in exactly one of `inner` and `root`."""

    inner: tuple[Unit, ...]
    """In the module's order; a unit that contains others precedes them."""
    root: Unit

    @property
    def bottom_up(self) -> tuple[Unit, ...]:
        """All units, inner ones before those that contain them, the root last."""
        return (*reversed(self.inner), self.root)


def choose_units(root: Module, units: UnitChoice = "auto", *, children: bool = False) -> Units:
    """Divide `root` into units. Parameters may be on any device, including meta.

    Units that share a parameter are replaced with one unit: their nearest common ancestor that has a `forward`.

    Args:
        root: the module to divide.
        units: `"auto"` chooses repeated blocks: submodules of the same class in a `ModuleList` or `Sequential`, if
            they have submodules or a parameter with two or more dimensions; and the classes in `_no_split_modules` of a
            `transformers` model. Otherwise, classes or their names, which include subclasses; or a function that takes
            a submodule's dotted name and the submodule, and returns whether to choose it.
        children: also choose each callable module that `root` holds directly, or in a list or dict.

    Raises:
        ConfigurationError: no submodule matches `units`.
    """
    chosen = set(_repeated_blocks(root) if units == "auto" else _match(root, units))
    if children:
        chosen |= set(_callable_children(root))
    _join_tied(root, chosen)
    return partition(root, chosen)


def has_forward(module: Module) -> bool:
    """Return whether `module` can be called; a `ModuleList` cannot."""
    return type(module).forward is not Module.forward


def _repeated_blocks(root: Module) -> Iterator[Module]:
    """Yield the outermost repeated blocks of `root`."""
    unsplittable = {
        name for module in root.modules() for name in (getattr(module, "_no_split_modules", None) or ()) if name
    }

    def search(module: Module) -> Iterator[Module]:
        children = list(module.children())
        repeated: set[type[Module]] = set()
        if isinstance(module, ModuleList | Sequential):
            classes = [type(child) for child in children if _is_block(child)]
            repeated = {cls for cls in classes if classes.count(cls) > 1}
        for child in children:
            if type(child) in repeated or type(child).__name__ in unsplittable:
                yield child
            else:
                yield from search(child)

    yield from search(root)


def _callable_children(module: Module) -> Iterator[Module]:
    for child in module.children():
        if has_forward(child):
            yield child
        else:
            yield from _callable_children(child)


def _is_block(module: Module) -> bool:
    if not has_forward(module):
        return False
    composed = next(module.children(), None) is not None
    return any(composed or parameter.dim() > 1 for parameter in module.parameters())


def _match(root: Module, units: UnitChoice) -> list[Module]:
    submodules = [(name, module) for name, module in root.named_modules() if module is not root]
    if callable(units) and not isinstance(units, type):
        choices: list[tuple[object, Callable[[str, Module], bool]]] = [(getattr(units, "__name__", units), units)]
    else:
        classes = [units] if isinstance(units, str | type) else units
        choices = [(repr(getattr(cls, "__name__", cls)), partial(_is_instance, cls)) for cls in classes]
    chosen = []
    for choice, chooses in choices:
        found = [module for name, module in submodules if chooses(name, module)]
        if not found:
            held = {type(module).__name__ for _, module in submodules if next(module.parameters(), None) is not None}
            raise ConfigurationError(
                f"units={choice} chooses none of the {len(submodules)} submodules of {type(root).__name__}. Name their "
                f"classes, {_shortened(sorted(held))}, or give a function of a submodule's dotted name, such as "
                f"{_shortened([name for name, _ in submodules], 3)}, and the submodule."
            )
        chosen += found
    lists = [module for module in chosen if not has_forward(module)]
    if lists:
        raise ConfigurationError(
            f"units chooses a {type(lists[0]).__name__}, which has no forward. Choose the modules in it."
        )
    return chosen


def _is_instance(cls: str | type[Module], name: str, module: Module) -> bool:
    if isinstance(cls, str):
        return any(base.__name__ == cls for base in type(module).__mro__[:-1] if base is not Module)
    return isinstance(module, cls)


def _shortened(names: list[str], most: int = 30) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _join_tied(root: Module, chosen: set[Module]) -> None:
    """Replace units that share a parameter with their nearest callable common ancestor, in place."""
    modules = dict(root.named_modules(remove_duplicate=False))
    holders: dict[Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, []).append(name.rpartition(".")[0])
    while apart := [names for names in holders.values() if len(_owners(names, modules, chosen)) > 1]:
        ancestor = modules[_callable_ancestor(apart[0], modules)]
        inside = set(ancestor.modules()) - {ancestor}
        chosen -= inside & _owners(apart[0], modules, chosen)
        if ancestor is not root:
            chosen.add(ancestor)


def _owners(names: list[str], modules: dict[str, Module], chosen: set[Module]) -> set[Module]:
    """Return the units to which the modules called `names` belong."""
    owners = set()
    for name in names:
        while name and modules[name] not in chosen:
            name = name.rpartition(".")[0]
        owners.add(modules[name])
    return owners


def _callable_ancestor(names: list[str], modules: dict[str, Module]) -> str:
    name = names[0]
    while name and not (has_forward(modules[name]) and all(f"{other}.".startswith(f"{name}.") for other in names)):
        name = name.rpartition(".")[0]
    return name


def partition(root: Module, chosen: set[Module]) -> Units:
    """Divide `root` into units: the `chosen` submodules and the root."""
    inner: list[Unit] = []
    taken: set[Parameter] = set()
    for name, module in reversed([pair for pair in root.named_modules() if pair[1] in chosen]):
        own = tuple(parameter for parameter in module.parameters() if parameter not in taken)
        if own:
            taken.update(own)
            inner.append(Unit(name=name, module=module, parameters=own))
    rest = tuple(parameter for parameter in root.parameters() if parameter not in taken)
    return Units(inner=tuple(reversed(inner)), root=Unit(name="", module=root, parameters=rest))


def as_tree(units: Units) -> str:
    """Return a printable tree of the units with their sizes. Consecutive equal units share a line."""
    lines = [f"{type(units.root.module).__name__} (the root): {_size(units.root)}"]
    groups = [list(group) for _, group in groupby(units.inner, key=_description)]
    for number, group in enumerate(groups):
        branch = "└─" if number == len(groups) - 1 else "├─"
        name, times = group[0].name, ""
        if len(group) > 1:
            name, times = f"{name} ... {group[-1].name}", f"{len(group)} x "
        lines.append(f"{branch} {name} ({type(group[0].module).__name__}): {times}{_size(group[0])}")
    return "\n".join(lines)


def _description(unit: Unit) -> tuple[object, ...]:
    return type(unit.module), unit.name.rpartition(".")[0], unit.num_params, unit.num_bytes


def _size(unit: Unit) -> str:
    return f"{unit.num_params:,} parameters, {format_bytes(unit.num_bytes)}"


def explain_single_unit(units: Units) -> str:
    """Return a warning that says that all parameters are in the root, what this costs, and what to do."""
    return (
        f"All of {type(units.root.module).__name__} is one unit: {_size(units.root)}. Its parameters are all gathered "
        "at once, so sharding saves memory for gradients and optimizer state but not for parameters during a step, and "
        "no all-gather overlaps computation. Choose units by their classes, units=[...], or by a function of name and "
        "module, such as of its size."
    )
