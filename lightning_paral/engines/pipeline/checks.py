"""Reject modules that cannot be trained in a pipeline, before the first step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.compat.torch.modules import BatchNorm
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.pipeline.guards import hook_on_parameter
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.checks import check_embeddings


def warn_of_own_optimizer(optimizer: Optimizer) -> None:
    """Warn if `optimizer` is not known to update each parameter on its own: a stage has the gradients of some of them.

    Optimizers of torch do, or fail on parameters of other stages.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    rank_zero_warn(
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is not an optimizer of torch. In a pipeline, its "
        "steps have the gradients of one stage. If it combines parameters, such as in a norm over all of them, it "
        "would train differently than in one process: use paral_fsdp."
    )


def check_before_fit(module: LightningModule, dims: ParallelDims, *, has_sync_batchnorm: bool) -> None:
    """Raise a `ConfigurationError` if training `module` in a pipeline would not equal training in one process."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{name} uses manual optimization. In a pipeline, the backward passes of the micro-batches run inside "
            "training_step, so it cannot call them itself. Use automatic optimization, or train with paral_fsdp."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigurationError(
            f"{name}.training_step takes a `dataloader_iter`, so there is no batch to divide into micro-batches. Take "
            "`batch`, or train with paral_fsdp."
        )
    if has_sync_batchnorm:
        raise ConfigurationError(
            "Trainer(sync_batchnorm=True) cannot be used in a pipeline, whose stages run different layers at the same "
            "time. Leave it out, or train with paral_fsdp."
        )
    hook = hook_on_parameter(module)
    if hook is not None:
        raise ConfigurationError(hook)
    check_embeddings(module, dims.data_size, "a pipeline")


def batch_norms_of(module: Module) -> dict[str, BatchNorm]:
    """Return the BatchNorms in `module` by their dotted names."""
    return {name: part for name, part in module.named_modules() if isinstance(part, BatchNorm)}


def check_batch_norms(layers: dict[str, BatchNorm]) -> None:
    """Check before a step with several micro-batches that no BatchNorm normalizes by its batch.

    One in eval mode, as in a frozen encoder, does not. Hooks may change the mode between steps.

    Raises:
        ConfigurationError: one of `layers` does.
    """
    for name, layer in layers.items():
        if layer.training or layer.running_mean is None:
            raise ConfigurationError(
                f"{name} is a BatchNorm, which would normalize each micro-batch on its own, and so train differently "
                "than in one process. Set micro_batches=1, use GroupNorm or LayerNorm, call its eval() if it is "
                "frozen, or train with paral_fsdp."
            )


def warn_of_repeated_predictions(callbacks: Iterable[Callback], dims: ParallelDims) -> None:
    """Warn that the stages of a pipeline have the same predictions, if a callback writes those of each rank."""
    writer = next((each for each in callbacks if isinstance(each, BasePredictionWriter)), None)
    if writer is not None and dims.pipeline > 1:
        rank_zero_warn(
            f"{type(writer).__name__} writes on each of {dims.num_ranks} ranks, but all stages of a pipeline have the "
            "same predictions. To write each once, let it write only where trainer.global_rank < "
            f"trainer.strategy.dims.data_size, which is {dims.data_size} here."
        )


@contextmanager
def refusing_several_optimizers(module: LightningModule) -> Iterator[None]:
    """Raise a `ConfigurationError` if `configure_optimizers`, called inside the block, returns several optimizers.

    Lightning's error recommends manual optimization, which a pipeline refuses.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("Training with multiple optimizers is only supported with manual optimization"):
            raise
        raise ConfigurationError(
            f"{type(module).__name__} has several optimizers. Lightning trains with them by manual optimization only, "
            "which a pipeline does not support. Return one optimizer from configure_optimizers, whose parameter groups "
            "may have different learning rates, or train with paral_fsdp."
        ) from error
