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
        self._parameters = self._sums()
        self._buffers = {name: buffer.detach().clone() for name, buffer in self._own_buffers().items()}

    def sums(self) -> dict[str, list[float]]:
        """Return two sums over each parameter of this stage, by which changes are found."""
        return {name: sums.tolist() for name, sums in self._sums().items()}

    def changed_parameters(self) -> dict[str, Tensor]:
        """Return the sums over the parameters that have changed since, by name."""
        now = self._sums()
        known = {name: sums for name, sums in self._parameters.items() if name in now}
        return {name: now[name] for name, sums in known.items() if not _are_close(now[name], sums, 0.0)}

    def explain_differing_parameters(
        self, expected: dict[str, Tensor], of_stages: Sequence[dict[str, list[float]]]
    ) -> str | None:
        """Return the error for a parameter that further steps change again, or that differs between stages, or `None`.

        A clamp at the beginning of a step, for example, does neither.

        Args:
            expected: the sums over the parameters that a step has changed, by name.
            of_stages: what `sums` returns on each stage after this step.
        """
        now = self._sums()
        for name, sums in expected.items():
            found = [stage[name] for stage in of_stages if name in stage]
            if name not in now or not _are_close(now[name], sums, 0.0) or any(other != found[0] for other in found):
                return (
                    f"{type(self._module).__name__}.training_step changes the parameter {name}. In a pipeline, the "
                    "stages run different parts of training_step, each once per micro-batch. Change parameters in "
                    "on_train_batch_end, or train with paral_fsdp."
                )
        return None

    def changed_buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers that have changed since, by name."""
        now = self._own_buffers()
        return {
            name: now[name].detach().clone()
            for name, before in self._buffers.items()
            if name in now and not _are_close(now[name], before, 0.0)
        }

    def explain_differing_buffers(self, expected: dict[str, Tensor]) -> str | None:
        """Return the error for a buffer that differs from the value that one step on the whole batch gives, or `None`.

        Args:
            expected: these values by name.
        """
        now = self._own_buffers()
        for name, value in expected.items():
            if name not in now or not _are_close(now[name], value, _TOLERANCE):
                return (
                    f"{type(self._module).__name__}.training_step changes the buffer {name}: after the two "
                    "halves of a batch, it has another value than after the whole batch. A pipeline computes "
                    "micro-batches, so it would train differently than one process. Set micro_batches=1, or train with "
                    "paral_fsdp. If the difference is intended, set check_steps=False."
                )
        return None

    def _sums(self) -> dict[str, Tensor]:
        own = {name: each.detach() for name, each in self._module.named_parameters() if not is_elsewhere(each)}
        return {
            name: torch.stack([each.sum(dtype=torch.float64), each.abs().sum(dtype=torch.float64)])
            for name, each in own.items()
            if not each.is_complex() and each.dtype != torch.bool
        }

    def _own_buffers(self) -> dict[str, Tensor]:
        metrics = [name for name, part in self._module.named_modules() if isinstance(part, Metric)]
        return {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if not buffer.is_meta and not any(name.startswith(f"{metric}.") for metric in metrics)
        }


def _are_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
