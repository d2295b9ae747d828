"""Find parameters and buffers that a training step changes in its forward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from lightning_paral.engines.pipeline.elsewhere import is_elsewhere

_TOLERANCE = 1e-4


class StateOfStep:
    """The parameters and buffers of this stage before a step.

    Args:
        module: the divided LightningModule.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._before = self._values()

    def sums(self) -> dict[str, list[float]]:
        """Return two sums over each parameter of this stage, by which changes are found."""
        return {name: sums.tolist() for name, sums in self._sums().items()}

    def changed(self) -> dict[str, Tensor]:
        """Return copies of the buffers, and the sums over the parameters, that have changed since, by name."""
        now = self._values()
        known = {name: value for name, value in self._before.items() if name in now}
        return {name: now[name] for name, value in known.items() if not _are_close(now[name], value, 0.0)}

    def explain_changed(
        self, expected: dict[str, Tensor], of_stages: Sequence[dict[str, list[float]]], *, divides_batches: bool
    ) -> str | None:
        """Return the error for what differs from its value after one step on the whole batch, or `None`.

        That is a parameter that further steps change again, or that differs between stages, and if batches are divided,
        a buffer that steps on the parts set to another value. A clamp at the beginning of a step does neither.

        Args:
            expected: what `changed` has returned after the step on the whole batch.
            of_stages: what `sums` returns on each stage after this step.
            divides_batches: whether batches are divided.
        """
        now = self._values()
        for name, value in expected.items():
            found = [stage[name] for stage in of_stages if name in stage]
            is_close = name in now and _are_close(now[name], value, 0.0 if found else _TOLERANCE)
            if found and (not is_close or any(other != found[0] for other in found)):
                return (
                    f"{type(self._module).__name__}.training_step changes the parameter {name}. In a pipeline, the "
                    "stages run different parts of training_step, each once per micro-batch. Change parameters in "
                    "on_train_batch_end, or train with paral_fsdp."
                )
            if divides_batches and not found and not is_close:
                return (
                    f"{type(self._module).__name__}.training_step changes the buffer {name}: after the two "
                    "halves of a batch, it has another value than after the whole batch. A pipeline computes "
                    "micro-batches, so it would train differently than one process. Set micro_batches=1, or train with "
                    "paral_fsdp. If the difference is intended, set check_steps=False."
                )
        return None

    def _values(self) -> dict[str, Tensor]:
        metrics = [name for name, part in self._module.named_modules() if isinstance(part, Metric)]
        buffers = {
            name: buffer.detach().clone()
            for name, buffer in self._module.named_buffers()
            if not buffer.is_meta and not any(name.startswith(f"{metric}.") for metric in metrics)
        }
        return buffers | self._sums()

    def _sums(self) -> dict[str, Tensor]:
        own = {name: each.detach() for name, each in self._module.named_parameters() if not is_elsewhere(each)}
        return {
            name: torch.stack([each.sum(dtype=torch.float64), each.abs().sum(dtype=torch.float64)])
            for name, each in own.items()
            if not each.is_complex() and each.dtype != torch.bool
        }


def _are_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
