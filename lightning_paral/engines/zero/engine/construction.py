"""Partition the parameters of a stage-3 model while it is built, so that no rank ever holds all of them in full."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.compat.deepspeed import stage3
from lightning_paral.compat.deepspeed.stage3 import preserve_linear
from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass
from lightning_paral.engines.zero.engine.same_construction import SameConstruction
from lightning_paral.engines.zero.parameters.partition import (
    is_partitioned,
    is_stage3_parameter,
    make_contiguous,
    view_scalars_as_bytes,
)
from lightning_paral.model.hugging_face import is_loading_pretrained, is_pretrained
from lightning_paral.quantities import format_bytes


@contextmanager
def build_partitioned(config: dict[str, Any], module: Module | None) -> Iterator[None]:
    """Partition parameters that are created in this context, as soon as they have values.

    *Collective* over the world.

    Args:
        config: DeepSpeed's configuration.
        module: the module that is built. Its new parameters that are still full at the end of the context, such as
            those that `from_pretrained` loads, are partitioned then.

    Raises:
        ConfigurationError: the ranks create different parameters.
    """
    import deepspeed

    # torch caches the functions that a device context changes. Fill the cache before `zero.Init` replaces some of them.
    with torch.device("meta"):
        torch.empty(0)
    constructors = stage3.plain_constructors()
    same = SameConstruction()
    before = set() if module is None else set(module.parameters())
    with preserve_linear():  # `zero.Init` replaces `F.linear` permanently
        # Do not override dtypes: the default dtype is already that of the weights, and others are chosen by user code.
        device_only = [deepspeed.zero.DeepSpeedTensorOverride.device]
        initialization = _Initialization(same)
        init = deepspeed.zero.Init(config_dict_or_path=config, tensor_overrides=device_only)
        _for_any_layout(init, same, initialization)
        stage3.keep_decorated_constructors(init)
        with init, initialization:
            _pause_while_loading(init, constructors, same)
            yield
        if module is not None:
            gained = {name: parameter for name, parameter in module.named_parameters() if parameter not in before}
            warn_about_different_draws(gained, init.local_device)
            same.expect_named(gained)
            _partition(init, gained.values())
        same.check_end()


def _for_any_layout(init: Any, same: SameConstruction, initialization: "_Initialization") -> None:
    """Let `zero.Init` partition parameters of any layout, shape and dtype; convert them to the dtype of the weights.

    `same` compares each of them with that of rank 0. `initialization` is paused meanwhile.
    """

    def partition_any(partition: Callable[[Parameter], None], parameter: Parameter) -> None:
        if init.dtype != torch.float32 and parameter.is_floating_point():
            parameter.data = parameter.data.to(init.dtype)
        make_contiguous(parameter)
        same.check_parameter(parameter)
        with view_scalars_as_bytes(), initialization.paused():
            partition(parameter)

    stage3.partition_parameters_by(init, partition_any)


def _pause_while_loading(init: Any, constructors: dict[str, Callable[..., Tensor]], same: SameConstruction) -> None:
    """Pause `init` while `from_pretrained` loads a model: it builds the model on the meta device, as in one process.

    Otherwise `init` would allocate, initialize and partition the model before values are loaded from the files.

    Args:
        init: a `zero.Init` that has been entered.
        constructors: torch's original functions that create tensors, by name.
        same: told of each module that is partitioned.
    """

    def partition_unless_loading(partition: Callable[[Module], None], module: Module) -> None:
        if not is_loading_pretrained():
            same.expect_module(module)
            partition(module)

    stage3.partition_modules_by(init, partition_unless_loading)
    stage3.choose_constructors(constructors, is_loading_pretrained)


@torch.no_grad()
def _partition(init: Any, parameters: Iterable[Parameter]) -> None:
    """Partition those of `parameters` that are full, one by one, with the values of rank 0. *Collective*."""
    for parameter in parameters:
        if is_stage3_parameter(parameter):
            continue
        if dist.get_rank() > 0:
            # The parameter may be a private mapping of a file. Values received into it would occupy memory until the
            # file is unmapped.
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        stage3.partition_full(init, parameter)


def warn_about_different_draws(parameters: dict[str, Parameter], device: torch.device) -> None:
    """Warn if `parameters` were initialized on CPU, although a run with one process would initialize them on `device`.

    `from_pretrained` initializes weights that are not in the folder, on the device of the context that it runs in. Here
    it runs outside of such a context, which would put the full model on the device.
    """
    if device.type == "cpu":
        return
    drawn = [
        name
        for name, parameter in parameters.items()
        if not is_stage3_parameter(parameter) and parameter.device.type == "cpu" and not is_pretrained(parameter)
    ]
    if drawn:
        rank_zero_warn(
            f"{', '.join(drawn)}: initialized on CPU, to the same values on all ranks, but to other values than one "
            f"process draws on {device.type} from this seed. This happens to weights that `from_pretrained` does not "
            "find in the folder. To compare with one process, save the model with these weights, and load that folder "
            "in both runs."
        )


def warn_about_full_parameters(module: Module) -> None:
    """Warn if `module` has parameters that were built in full on every rank."""
    full = [parameter for parameter in module.parameters() if not is_stage3_parameter(parameter)]
    if full:
        size = format_bytes(sum(parameter.numel() * parameter.element_size() for parameter in full))
        rank_zero_warn(
            f"{type(module).__name__} was built outside `configure_model`: every rank holds all parameters "
            f"({size}) in host memory until they are partitioned, and again at the end of the fit. Build "
            "them in `configure_model`, where they are partitioned one by one."
        )


class _Initialization(TorchFunctionMode):
    """A context for `configure_model` that gathers partitioned parameters when code uses them.

    `zero.Init` partitions a module's parameters as soon as its constructor ends. Code that initializes them afterwards,
    such as `nn.init.normal_(self.head.weight)`, would write to an empty tensor, without an error and without effect.
    *Collective* over the world: all ranks run the same `configure_model`. A parameter stays gathered until another one
    is used, so that code can also write to its `.data`. All ranks get the values that rank 0 has written.
    """

    def __init__(self, same: SameConstruction) -> None:
        super().__init__()
        self._same = same
        self._gathered: Any = None
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gather nothing inside this context.

        DeepSpeed 0.19.8 reads the shape of each parameter for a log message just after it has partitioned the
        parameter. If that gathered the parameter again, every rank would build the whole model in full.
        """
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _METADATA_FUNCTIONS and not self._is_paused:
            touched = [
                value for value in (*args, *kwargs.values()) if isinstance(value, Parameter) and is_partitioned(value)
            ]
            if touched:
                self._gather(touched)
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if exception[0] is None:
            self._same.check_end()
        elif dist.get_world_size() > 1:
            self._gathered = None  # to release them is collective, and other ranks may be elsewhere
        self._release()

    def _gather(self, parameters: list[Parameter]) -> None:
        from deepspeed.runtime.zero import GatheredParameters

        self._same.check_use(parameters)
        self._release()
        with DisableTorchFunctionSubclass(), view_scalars_as_bytes():
            self._gathered = GatheredParameters(parameters, modifier_rank=0)
            self._gathered.__enter__()

    def _release(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            with DisableTorchFunctionSubclass(), view_scalars_as_bytes():
                gathered.__exit__(None, None, None)


_METADATA_FUNCTIONS = {
    getattr(Tensor, attribute).__get__
    for attribute in ("requires_grad", "device", "dtype", "is_leaf", "grad", "layout")
} | {Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]
