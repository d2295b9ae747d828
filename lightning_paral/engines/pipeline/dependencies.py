"""Find out on which units the tensors of a step depend."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, UntypedStorage

from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.compat.torch.autograd import is_of_transform
from lightning_paral.compat.torch.tensors import TorchDispatchMode, tree_leaves, tree_map_only
from lightning_paral.engines.pipeline.calls import BEFORE_UNITS
from lightning_paral.errors import CheckpointError, ConfigurationError
from lightning_paral.model.units import Unit

_NONE: frozenset[int] = frozenset()


class Dependencies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the operations of one forward pass; an `Observer` of `UnitCalls`.

    A stage has the output of the last unit only, and code between and after the units runs on one stage only. Therefore
    a unit may depend on no other unit than the one before it, and the code after the chain on no other than the last.
    The first violation is kept in `fault`.

    Args:
        step: the name of the step, for errors.
        units: the units of the chain.
        own: the positions of the units of this stage.
        first: the names of the modules of `first_stage` that this stage lacks. Their outputs have no values here, so
            only the first unit may depend on them.
    """

    def __init__(self, step: str, units: Sequence[Unit], own: range, first: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step
        self._units = units
        self._first = first
        self._running: int | None = None
        self._num_called = 0
        self._of: dict[int, tuple[UntypedStorage, frozenset[int]]] = {}
        """By address of a storage: the storage, kept so that its address is not reused, and the units whose outputs its
        values were computed from."""
        self._inside: dict[int, int] = {}
        """By address of a storage: the unit whose parameter it is, or that has created it without returning it."""
        self.fault: str | None = None
        for number in own:
            for parameter in units[number].module.parameters():
                self._keep(parameter, _NONE)
                self._inside[_address(parameter)] = number

    def before(self, unit: int) -> None:
        """Note that a unit begins. What it gets is checked when it is used: a cache may hold more than a unit uses."""
        self._running = unit

    def after(self, unit: int, output: Any) -> Any:
        """Return `output` in memory of its own, which depends on this unit only."""
        self._running = unit  # also for a unit of an earlier stage, whose output was received
        copied = tree_map_only(Tensor, Tensor.clone, output)
        self._running, self._num_called = None, unit + 1
        for tensor in _tensors_in(copied):
            self._keep(tensor, frozenset([unit]))
            self._inside.pop(_address(tensor), None)
        return copied

    def explain(self, error: Exception | None = None) -> str | None:
        """Return why the step cannot be divided; `None` if no violation was found.

        Args:
            error: the error that has ended the step. Violations often cause others, such as shapes that do not match.
        """
        if isinstance(
            error, ConfigurationError | CheckpointError
        ):  # the latter if a parameter of another stage is used
            return str(error)
        if self.fault is None:
            return None
        return (
            f"{self._step} cannot be divided among the stages of a pipeline: {self.fault}. A unit may use only what "
            "the unit before it returns, and the code after the last unit only what that one returns. Choose other "
            f"units with units=[...], {'leave modules out of first_stage, ' * bool(self._first)}or train with "
            "paral_fsdp."
        )

    def check_kept(self, values: Any) -> None:
        """Check that values that outlive the step depend on no module of `first_stage`."""
        if self._first and self.fault is None:
            for tensor in _tensors_in(values):
                if BEFORE_UNITS in self._units_of(tensor):
                    self.fault = f"the step logs or keeps in an attribute what {self._name(BEFORE_UNITS)} has returned"

    def check_result(self, result: Any) -> None:
        """Check that what the step returns depends on no other unit than the last."""
        for tensor in _tensors_in(result):
            self._check(tensor, len(self._units))

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what its results depend on."""
        result = func(*args, **(kwargs or {}))
        inputs = _tensors_in((args, kwargs))
        position = self._num_called if self._running is None else self._running
        found = _NONE.union(*(self._check(tensor, position) for tensor in inputs))
        if BEFORE_UNITS in found and _has_number(result):
            raise ConfigurationError(
                f"The code before the first unit reads a value of what {self._name(BEFORE_UNITS)} has returned, which "
                "first_stage keeps on the first stage only. Leave it out of first_stage, so that all stages have it."
            )
        before = {_address(tensor) for tensor in inputs}
        for tensor in _tensors_in(result):
            self._keep(tensor, found | self._units_of(tensor))
            if self._running is not None and _address(tensor) not in before:  # not a view of an input
                self._inside[_address(tensor)] = self._running
        return result

    def _check(self, tensor: Tensor, position: int) -> frozenset[int]:
        """Return the units that `tensor` depends on; note a fault if unit `position` must not use it."""
        units, inside = self._units_of(tensor), self._inside.get(_address(tensor))
        if self.fault is None:
            earlier = sorted(unit for unit in units if unit < position - 1)
            if inside is not None and inside != self._running:
                self.fault = f"{self._user(position)} uses a tensor from inside {self._name(inside)}"
            elif earlier:
                self.fault = f"{self._user(position)} uses what {self._name(earlier[0])} has returned"
        return units

    def _user(self, position: int) -> str:
        if self._running is not None or position < self._num_called:
            return self._name(position)
        if position == len(self._units):
            return "the code after the last unit"
        return f"the code before {self._name(position)}"

    def _name(self, unit: int) -> str:
        return " or ".join(self._first) if unit == BEFORE_UNITS else self._units[unit].name

    def _units_of(self, tensor: Tensor) -> frozenset[int]:
        return self._of.get(_address(tensor), (None, _NONE))[1]

    def _keep(self, tensor: Tensor, units: frozenset[int]) -> None:
        storage = tensor.untyped_storage()
        self._of[storage.data_ptr()] = storage, units


def _has_number(result: Any) -> bool:
    return any(isinstance(leaf, bool | int | float | complex) for leaf in tree_leaves(result))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in `values` that have values, which parameters of other stages have not."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not isinstance(leaf, FlatShard)]
    # The next unit refuses transforms, whose tensors have no memory.
    return [each for each in tensors if each.numel() and not each.is_meta and not is_of_transform(each)]
