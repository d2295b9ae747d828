"""Random numbers on split activations: each rank draws its own, and all ranks continue with equal ones."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MODULUS = 2**63 - 1


class SplitStreams:
    """Switches torch's global generators between numbers that all tensor ranks draw and those of this rank.

    Activations that every rank has in full need equal dropout masks on all ranks. Those of which each rank has a part
    need masks of their own. Either a single function draws them, inside `own_draws`, or, where code gets ordinary
    tensors with a rank's features, all functions between `enter` and `leave`. Recomputed activations get the same masks
    again.

    Args:
        rank: the tensor rank.
        device: the device of this rank.
        batch_number: returns the number of the batch, which differs from step to step.
        is_active: returns whether numbers may be drawn: in training, if there is any dropout.
    """

    def __init__(
        self, rank: int, device: torch.device, batch_number: Callable[[], int], is_active: Callable[[], bool]
    ) -> None:
        self._rank = rank
        self._device = device
        self._batch_number = batch_number
        self._is_active = is_active
        self._shared: list[Tensor] | None = None

    def enter(self, layer: int) -> None:
        """Draw this rank's numbers until `leave`. Do nothing if it does so already.

        Their seed follows from the state of the generator, the number of the batch, the layer and the rank. It does not
        change the state, so code outside draws the same numbers as without tensor parallelism.

        Args:
            layer: the number of the layer whose output is split.
        """
        if self._shared is not None or not self._is_active():
            return
        self._shared = self._states()
        key = f" {self._batch_number()} {layer} {self._rank}".encode()
        self._seed(self._shared[-1].numpy().tobytes() + key)

    def leave(self) -> None:
        """Continue with the numbers that all tensor ranks draw.

        Call it before each step as well: a step may have failed, or a hook may have called a layer of a chain alone.
        """
        if self._shared is None:
            return
        state, *of_device = self._shared
        torch.set_rng_state(state)
        for each in of_device:
            torch.cuda.set_rng_state(each, self._device)
        self._shared = None

    @contextmanager
    def own_draws(self) -> Iterator[None]:
        """Draw this rank's numbers inside the block. Their seed is drawn from the numbers of all tensor ranks."""
        if self._shared is not None:
            yield
            return
        seed = int(torch.randint(_MODULUS, (), device="cpu"))
        self._shared = self._states()
        self._seed(f"{seed} {self._rank}".encode())
        try:
            yield
        finally:
            self.leave()

    def _seed(self, key: bytes) -> None:
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % _MODULUS
        # torch.manual_seed takes milliseconds where other devices are not initialized: it keeps a traceback for each.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)

    def _states(self) -> list[Tensor]:
        of_device = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *of_device]
