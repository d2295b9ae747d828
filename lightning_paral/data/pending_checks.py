"""Find the first of many checks that failed, when their results are on a GPU, without waiting for the GPU."""

from typing import Generic, TypeVar

from torch import Tensor

from lightning_paral.data.async_scalar import AsyncScalar

_MANY = 1024

Place = TypeVar("Place")


class PendingChecks(Generic[Place]):
    """Checks whose results are still on a device. It keeps the place of each in the run, to name that of a failure."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._have_passed: Tensor | None = None
        self._num_passed: Tensor | None = None
        self._sent: tuple[AsyncScalar, list[Place]] | None = None

    @property
    def are_many(self) -> bool:
        """Whether `first_failed` should be called, to forget the places of checks that have passed."""
        return len(self._places) >= _MANY

    def add(self, has_passed: Tensor, place: Place) -> None:
        """Add a check.

        Args:
            has_passed: its result, a 0-dimensional tensor of booleans.
            place: where it was made.
        """
        if self._have_passed is None or self._num_passed is None:
            self._have_passed, self._num_passed = has_passed, has_passed.long()
        else:
            self._have_passed = self._have_passed & has_passed
            self._num_passed = self._num_passed + self._have_passed  # those before the first that failed
        self._places.append(place)

    def first_failed(self, *, wait: bool) -> Place | None:
        """Return the place of the first check that failed; `None` if none did. Forget the checks that have arrived.

        Args:
            wait: whether to wait for all results. Otherwise read only those that have arrived.
        """
        while self._sent is not None or self._num_passed is not None:
            if self._sent is None:
                assert self._num_passed is not None
                self._sent = AsyncScalar(self._num_passed), self._places
                self._places, self._have_passed, self._num_passed = [], None, None
            num_passed, places = self._sent
            if not (wait or num_passed.has_arrived):
                return None
            self._sent = None
            first = int(num_passed.read())
            if first < len(places):
                return places[first]
        return None
