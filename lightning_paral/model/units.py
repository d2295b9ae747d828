"""Units: the submodules whose parameters are sharded and gathered together; the root unit has the remaining ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.nn import Module, ModuleDict, ModuleList, Parameter, Sequential

from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import UnitChoice, check_unit_choice


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A submodule and its own parameters."""

    name: str
    """Dotted, from the root; empty for the root."""
    module: Module
    parameters: tuple[Parameter, ...]
    """Each once; without those of units inside this one."""

    @property
    def num_params(self) -> int:
        """Number of elements in `parameters`."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def num_bytes(self) -> int:
        """Bytes of `parameters`, unsharded."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class Units:
    """A module divided into units: every parameter is in exactly one of `inner` and `root`."""

    inner: tuple[Unit, ...]
    """In the order of the model; a unit that contains others comes before them."""
    root: Unit

    @property
    def bottom_up(self) -> tuple[Unit, ...]:
        """All units, inner ones before those that contain them, the root last."""
        return (*reversed(self.inner), self.root)


def choose_units(
    root: Module, units: UnitChoice = "auto", min_params: int | None = None, *, children: bool = False
) -> Units:
    """Divide `root` into units. Parameters may be on any device, meta included.

    Parameters shared between units make one unit of their nearest common ancestor that has a `forward`.

    Args:
        root: the full module.
        units: `"auto"` finds repeated blocks: layers of one class in a `ModuleList` or `Sequential` (themselves
            composed, or holding a matrix), and the classes a `transformers` model must not have split. Otherwise
            classes or their names, with subclasses, or a predicate of a submodule's dotted name and itself.
        min_params: in place of `units`: take the smallest submodules with at least so many parameters that are in no
            smaller unit.
        children: also make a unit of each callable module that `root` holds directly, or in a list or dict.

    Raises:
        ConfigurationError: no submodule matches `units` or `min_params`.
    """
    check_unit_choice(units, min_params)
    if min_params is not None:
        chosen = set(_of_size(root, min_params))
        if not chosen:
            total = sum(parameter.numel() for parameter in root.parameters())
            raise ConfigurationError(
                f"min_params={min_params:,}: no submodule of {type(root).__name__} has so many parameters. It has "
                f"{total:,} in all. Lower min_params, or name classes with units=[...]."
            )
    elif units == "auto":
        chosen = set(_repeated_blocks(root))
    else:
        chosen = set(_match(root, units))
    if children:
        chosen |= set(_callable_children(root))
    _join_tied(root, chosen)
    return _partition(root, chosen)


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
            kinds = [type(child) for child in children if _is_block(child)]
            repeated = {kind for kind in kinds if kinds.count(kind) > 1}
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


def _of_size(root: Module, min_params: int) -> Iterator[Module]:
    chosen: list[Module] = []
    counted: set[Parameter] = set()

    def visit(module: Module) -> None:
        for child in module.children():
            visit(child)
        if module is root or not has_forward(module) or module in chosen:
            return
        own = [parameter for parameter in module.parameters() if parameter not in counted]
        if sum(parameter.numel() for parameter in own) >= min_params:
            chosen.append(module)
            counted.update(own)

    visit(root)
    return iter(chosen)


def _match(root: Module, units: UnitChoice) -> list[Module]:
    submodules = [(name, module) for name, module in root.named_modules() if module is not root]
    if isinstance(units, str | type):
        units = [units]
    if callable(units):
        chosen = [module for name, module in submodules if units(name, module)]
        if not chosen:
            raise ConfigurationError(
                f"units={_name_of(units)} returned False for all {len(submodules)} submodules of "
                f"{type(root).__name__}. It is called with a submodule's dotted name and the submodule; names: "
                f"{_shortened([name for name, _ in submodules])}."
            )
    else:
        chosen = []
        for kind in units:
            found = [module for _, module in submodules if _is_of(module, kind)]
            if not found:
                classes = sorted(
                    {type(module).__name__ for _, module in submodules if next(module.parameters(), None) is not None}
                )
                raise ConfigurationError(
                    f"units names {kind if isinstance(kind, str) else kind.__name__!r}, but no submodule of "
                    f"{type(root).__name__} is of that class. Classes with parameters in it: {_shortened(classes)}."
                )
            chosen += found
    lists = [module for module in chosen if not has_forward(module)]
    if lists:
        raise ConfigurationError(
            f"units chooses a {type(lists[0]).__name__}, which is never called itself. Choose the modules in it."
        )
    return chosen


def _is_of(module: Module, kind: str | type[Module]) -> bool:
    if isinstance(kind, str):
        return any(base.__name__ == kind for base in type(module).__mro__[:-1] if base is not Module)
    return isinstance(module, kind)


def _name_of(predicate: Callable[..., bool]) -> str:
    return getattr(predicate, "__name__", repr(predicate))


def _shortened(names: list[str], most: int = 30) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _join_tied(root: Module, chosen: set[Module]) -> None:
    """Replace units that share a parameter by their nearest callable common ancestor."""
    modules = dict(root.named_modules(remove_duplicate=False))
    places: dict[Parameter, list[str]] = {}
    for name, module in modules.items():
        for parameter in own_parameters(module).values():
            if parameter is not None:
                places.setdefault(parameter, []).append(name)
    shared = [names for names in places.values() if len(names) > 1]
    changed = True
    while changed:
        changed = False
        for names in shared:
            owners = {_owner(name, modules, chosen) for name in names}
            if len(owners) == 1:
                continue
            ancestor = _callable_ancestor(names, modules)
            for owner in owners:
                inside = owner is not modules[ancestor] and any(part is owner for part in modules[ancestor].modules())
                if inside:
                    chosen.discard(owner)
            if ancestor:
                chosen.add(modules[ancestor])
            changed = True


def _owner(name: str, modules: dict[str, Module], chosen: set[Module]) -> Module:
    while name and modules[name] not in chosen:
        name = name.rpartition(".")[0]
    return modules[name]


def _callable_ancestor(names: list[str], modules: dict[str, Module]) -> str:
    common: list[str] = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    name = ".".join(common)
    while name and not has_forward(modules[name]):
        name = name.rpartition(".")[0]
    return name


def _partition(root: Module, chosen: set[Module]) -> Units:
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
    """Return a tree of the units with their sizes; equal neighbours share a line."""
    lines = [f"{type(units.root.module).__name__} (the root): {_size(units.root)}"]
    groups: list[list[Unit]] = []
    for unit in units.inner:
        last = groups[-1][-1] if groups else None
        if last is not None and _are_alike(last, unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    for number, group in enumerate(groups):
        branch = "└─" if number == len(groups) - 1 else "├─"
        name, times = group[0].name, ""
        if len(group) > 1:
            name, times = f"{name} ... {group[-1].name}", f"{len(group)} x "
        lines.append(f"{branch} {name} ({type(group[0].module).__name__}): {times}{_size(group[0])}")
    return "\n".join(lines)


def _are_alike(one: Unit, other: Unit) -> bool:
    def likeness(unit: Unit) -> tuple[object, ...]:
        return type(unit.module), unit.name.rpartition(".")[0], unit.num_params, unit.num_bytes

    return likeness(one) == likeness(other)


def _size(unit: Unit) -> str:
    return f"{unit.num_params:,} parameters, {unit.num_bytes / 1e6:,.1f} MB"


def explain_single_unit(units: Units) -> str:
    """Return a warning that all parameters are in the root: what that costs, and which classes to choose."""
    root = units.root.module
    sizes: dict[str, int] = {}
    for module in root.modules():
        if module is not root and not isinstance(module, ModuleList | ModuleDict):
            kind = type(module).__name__
            sizes[kind] = max(sizes.get(kind, 0), sum(parameter.numel() for parameter in module.parameters()))
    largest = sorted((kind for kind in sizes if sizes[kind]), key=lambda kind: -sizes[kind])[:5]
    choice = f"units=[{largest[0]!r}]" if largest else "units=[...]"
    return (
        f"All of {type(root).__name__} is one unit: {_size(units.root)}. Its parameters are gathered all at once, so "
        "sharding spares gradients and optimizer state but not the peak of parameters, and nothing is gathered while "
        f"something else computes. Choose units, for instance {choice} or min_params=100_000; classes with most "
        f"parameters: {', '.join(largest) or 'none, for all parameters are held by the root itself'}."
    )
