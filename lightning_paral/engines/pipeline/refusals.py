"""Refuse modules, and what code does to them, that a pipeline cannot train as one process does."""

from collections.abc import Collection, Iterable, Sequence

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.compat.torch.autograd import gradient_hooks, post_accumulate_grad_hooks
from lightning_paral.compat.torch.modules import BatchNorm
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.checks import check_embeddings


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
    check_parameter_hooks(module)
    check_embeddings(module, dims.data_size, "a pipeline")


def check_parameter_hooks(module: Module) -> None:
    """Raise a `ConfigurationError` if there is a hook on the gradient of a parameter."""
    for name, parameter in module.named_parameters():
        for hook in (gradient_hooks(parameter) | post_accumulate_grad_hooks(parameter)).values():
            raise ConfigurationError(
                f"{name} has a hook, {getattr(hook, '__qualname__', hook)!r}, from register_hook or "
                "register_post_accumulate_grad_hook. In a pipeline, it would be called once per micro-batch, with a "
                "part of the gradient. Clip with Trainer(gradient_clip_val=...), or train with paral_ddp."
            )


def check_new_parameters(module: Module, optimizers: Sequence[Optimizer], known: Collection[Parameter]) -> None:
    """Check before a step that optimizers got no parameters that are not `known`: their gradients are not averaged.

    Raises:
        ConfigurationError: one did.
    """
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    new = next((each for group in groups for each in group["params"] if each not in known), None)
    if new is not None:
        name = next((name for name, each in module.named_parameters() if each is new), "A parameter")
        raise ConfigurationError(
            f"{name} was given to an optimizer, but the module did not have it when it was divided among the stages of "
            "a pipeline. Its gradient would not be averaged. Create modules in __init__ or configure_model, or train "
            "with paral_fsdp."
        )


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


def warn_of_own_optimizer(optimizer: Optimizer) -> None:
    """Warn if `optimizer` is not known to update each parameter on its own: a stage has the gradients of some of them.

    Optimizers of torch do, or fail on parameters of other stages.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        rank_zero_warn(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is not an optimizer of torch. In a pipeline, "
            "its steps have the gradients of one stage. If it combines parameters, such as in a norm over all of them, "
            "it would train differently than in one process: use paral_fsdp."
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
