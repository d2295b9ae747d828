"""Modules outside of the chain that only the first or the last stage holds, such as embeddings and a head."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.modules import own_buffers, own_parameters, subclass_of
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.units import Units

Call = Callable[..., Any]


@dataclass(frozen=True)
class End:
    """A module that one stage holds, at an end of the chain."""

    name: str
    """The dotted name from the root."""
    module: Module
    option: str
    """The option that names it: `"first_stage"` or `"last_stage"`."""

    @property
    def is_first(self) -> bool:
        """Whether the first stage holds it."""
        return self.option == "first_stage"

    def stage(self, num_stages: int) -> int:
        """Return the stage that holds it."""
        return 0 if self.is_first else num_stages - 1

    @property
    def num_params(self) -> int:
        """The number of its parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())


def ends_of(units: Units, first: Sequence[str], last: Sequence[str]) -> list[End]:
    """Return the modules that the options name, and check that their parameters can be on one stage.

    Args:
        units: the units of the chain.
        first: the dotted names that `first_stage` gives.
        last: the dotted names that `last_stage` gives.

    Raises:
        ConfigurationError: a name is that of no submodule, or of one that overlaps with a unit or another of them; or a
            parameter is also outside of the submodule.
    """
    root = units.root.module
    modules = dict(root.named_modules())
    ends = [
        End(name, _module(modules, name, option, units), option)
        for option, names in (("first_stage", first), ("last_stage", last))
        for name in names
    ]
    taken = {unit.name: f"the unit {unit.name!r}" for unit in units.inner}
    for end in ends:
        for name, what in taken.items():
            if f"{end.name}.".startswith(f"{name}.") or f"{name}.".startswith(f"{end.name}."):
                raise ConfigurationError(
                    f"{end.option} names {end.name!r}, which overlaps with {what}. Name modules that are outside of "
                    "the units, each once."
                )
        taken[end.name] = f"{end.name!r} of {end.option}"
        _check_not_shared(end, root)
    return ends


def _module(modules: dict[str, Module], name: str, option: str, units: Units) -> Module:
    if name and name in modules:
        return modules[name]
    inside = tuple(f"{unit.name}." for unit in units.inner)
    around = [unit.name for unit in units.inner]
    known = [
        each
        for each, module in modules.items()
        if each
        and not f"{each}.".startswith(inside)
        and not any(unit.startswith(f"{each}.") for unit in around)
        and next(module.parameters(), None) is not None
    ]
    raise ConfigurationError(
        f"{option} names {name!r}, but {type(units.root.module).__name__} has no such submodule. Those with parameters "
        f"outside of the units are: {', '.join(known) or 'none'}."
    )


def _check_not_shared(end: End, root: Module) -> None:
    inside, own = set(end.module.modules()), set(end.module.parameters())
    for name, part in root.named_modules():
        for key, parameter in own_parameters(part).items():
            if part not in inside and parameter in own:
                within = next(each for each, value in end.module.named_parameters() if value is parameter)
                raise ConfigurationError(
                    f"{end.option} names {end.name!r}, but its parameter {within!r} is also "
                    f"{'.'.join(filter(None, (name, key)))!r}, which other stages may use. Leave {end.name!r} out of "
                    f"{end.option}, so that all stages have it."
                )


class EndCalls:
    """Replaces the calls of ends that other stages hold, during a run.

    The code before the chain runs on all stages, but only the first unit may use what modules of `first_stage` return.
    On later stages, these modules therefore return NaNs of the right shape: they run with NaN parameters that take no
    memory.

    Args:
        ends: those that this stage does not hold.
        next_unit: returns the position of the unit that is called next; `None` outside of a forward pass.
        given: is given the arguments of each call of a module of `first_stage` in a forward pass.
        returned: is given what a module of `first_stage` has returned in a forward pass, and returns what to use.
    """

    def __init__(
        self,
        ends: Sequence[End],
        next_unit: Callable[[], int | None],
        given: Callable[[Any], None],
        returned: Callable[[Any], Any],
    ) -> None:
        self._ends = ends
        self._next_unit = next_unit
        self._given = given
        self._returned = returned

    def install(self, undo: ExitStack) -> None:
        """Replace the calls until `undo` is closed."""
        for end in self._ends:
            original = type(end.module)
            end.module.__class__ = subclass_of(original, _end_class(self, end), {})
            undo.callback(setattr, end.module, "__class__", original)

    def call(self, end: End, run: Call, args: Any, kwargs: Any) -> Any:
        """Return what stands for the output of `end`, which `run` runs."""
        next_unit = self._next_unit()
        if next_unit is None:
            raise ConfigurationError(
                f"{end.name} was called outside of a training, validation, test or predict step, but {end.option} "
                f"keeps it on one stage only. Move the call into a step, or leave {end.name!r} out of {end.option}."
            )
        if not end.is_first or next_unit > 0:
            where = (
                "after the first unit, but first_stage keeps it on the first stage, and later stages"
                if end.is_first
                else "before the last unit, but last_stage keeps it on the last stage, and earlier stages"
            )
            raise ConfigurationError(
                f"{end.name} was called {where} do not have it. Leave {end.name!r} out of {end.option}, so that all "
                "stages have it."
            )
        self._given((args, kwargs))
        with torch.no_grad(), _nan_parameters(end.module):
            return self._returned(run(*args, **kwargs))


class NotCopied:
    """A module of a stage, which is not copied during a run."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ConfigurationError(
            "A module cannot be copied while it is divided among the stages of a pipeline, because this rank has only "
            "some of its parameters. Copy it before or after the run."
        )


def _end_class(calls: EndCalls, end: End) -> type:
    class EndOfOtherStage(NotCopied):
        """A module that another stage holds, whose calls `EndCalls` replaces."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return calls.call(end, super().__call__, args, kwargs)  # type: ignore[misc]

    return EndOfOtherStage


@contextmanager
def _nan_parameters(module: Module) -> Iterator[None]:
    """Give all parameters the value NaN inside the block, without memory, and keep changes of buffers inside it."""
    tables: list[dict[str, Any]] = []
    for part in module.modules():
        tables += [own_parameters(part), own_buffers(part)]
    kept = [(own, dict(own)) for own in tables]
    for own, before in kept:
        for name, tensor in before.items():
            if isinstance(tensor, Parameter):
                own[name] = Parameter(_nans_like(tensor), requires_grad=False)
            elif tensor is not None:
                own[name] = tensor.clone()
    try:
        yield
    finally:
        for own, before in kept:
            own.update(before)


def _nans_like(tensor: Tensor) -> Tensor:
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
