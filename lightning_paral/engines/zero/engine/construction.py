"""Build the model of stage 3 partitioned, so that no rank ever has all of it; warn if it was not."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.compat.deepspeed import zero_init
from lightning_paral.compat.deepspeed.linear import preserve_linear
from lightning_paral.compat.torch.torch_function import DisableTorchFunctionSubclass
from lightning_paral.engines.zero.parameters.partition import (
    is_of_stage3,
    is_partitioned,
    make_contiguous,
    scalars_as_bytes,
)
from lightning_paral.model.pretrained import is_loading_pretrained, is_pretrained


@contextmanager
def built_partitioned(config: dict[str, Any], module: Module | None) -> Iterator[None]:
    """Partition parameters that are created in this context, as soon as they have values.

    *Collective* over the world.

    Args:
        config: DeepSpeed's.
        module: the module that is built. Parameters that it gains and that are full at the end, such as those that
            `from_pretrained` loads, are partitioned then.
    """
    import deepspeed

    with torch.device("meta"):  # torch caches at the first call which functions such a context changes
        torch.empty(0)
    constructors = zero_init.plain_constructors()
    before = set() if module is None else set(module.parameters())
    with preserve_linear():  # `zero.Init` replaces it permanently
        # Not the dtype: the default dtype is that of the weights already, and a dtype that code names is what it needs.
        device_only = [deepspeed.zero.DeepSpeedTensorOverride.device]
        init = _for_any_layout(deepspeed.zero.Init(config_dict_or_path=config, tensor_overrides=device_only))
        zero_init.keep_decorated_constructors(init)
        with init, _Initialization():
            _pause_while_loading(init, constructors)
            yield
        if module is not None:
            gained = {name: parameter for name, parameter in module.named_parameters() if parameter not in before}
            warn_of_other_draws(gained, init.local_device)
            _partition(init, gained.values())


def _for_any_layout(init: Any) -> Any:
    """Let `zero.Init` partition parameters of any layout, dimension and dtype, converted to that of the weights."""

    def partition_any(partition: Callable[[Parameter], None], parameter: Parameter) -> None:
        if init.dtype != torch.float32 and parameter.is_floating_point():
            parameter.data = parameter.data.to(init.dtype)
        make_contiguous(parameter)
        with scalars_as_bytes():
            partition(parameter)

    zero_init.partition_parameters_by(init, partition_any)
    return init


def _pause_while_loading(init: Any, constructors: dict[str, Callable[..., Tensor]]) -> None:
    """Let `from_pretrained` build on the meta device, as it does in one process, until `init` is left.

    `zero.Init` would allocate, initialize and partition all of it before the values of the files are loaded.

    Args:
        init: a `zero.Init` that has been entered.
        constructors: torch's own.
    """

    def partition_unless_loading(partition: Callable[[Module], None], module: Module) -> None:
        if not is_loading_pretrained():
            partition(module)

    zero_init.partition_modules_by(init, partition_unless_loading)
    zero_init.choose_constructors(constructors, is_loading_pretrained)


@torch.no_grad()
def _partition(init: Any, parameters: Iterable[Parameter]) -> None:
    """Partition the full ones of `parameters`, one by one, with rank 0's values."""
    for parameter in parameters:
        if is_of_stage3(parameter):
            continue
        if dist.get_rank() > 0:
            # It may be a private mapping of a file, in which received values would take memory as long as it exists.
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        zero_init.partition_full(init, parameter)


def warn_of_other_draws(parameters: dict[str, Parameter], device: torch.device) -> None:
    """Warn if `parameters` were initialized on the host, while one process with the same seed does so on `device`.

    `from_pretrained` initializes weights that are not in the folder on the device of the context it runs in. It runs
    without one here, because it would put the full model on the device.
    """
    if device.type == "cpu":
        return
    drawn = [
        name
        for name, parameter in parameters.items()
        if not is_of_stage3(parameter) and parameter.device.type == "cpu" and not is_pretrained(parameter)
    ]
    if drawn:
        rank_zero_warn(
            f"{', '.join(drawn)}: drawn on the host, the same on all ranks, but with other numbers than one process "
            f"draws on {device.type} from this seed. It is so with weights that `from_pretrained` does not find in "
            "the folder. To compare with one process, save the model with them and load that folder in both."
        )


def warn_of_full_parameters(module: Module) -> None:
    """Warn if parameters of `module` were not built partitioned."""
    full = [parameter for parameter in module.parameters() if not is_of_stage3(parameter)]
    if full:
        size_mb = sum(parameter.numel() * parameter.element_size() for parameter in full) / 1e6
        rank_zero_warn(
            f"{type(module).__name__} was built outside `configure_model`: every rank holds all parameters "
            f"({size_mb:,.1f} MB) on the host until they are partitioned, and again at the end of the fit. Build "
            "them in `configure_model` to have them partitioned one by one."
        )


class _Initialization(TorchFunctionMode):
    """A context for `configure_model` that gathers partitioned parameters when code uses them.

    `zero.Init` partitions a module's parameters as soon as its constructor ends. Code that initializes them afterwards,
    such as `nn.init.normal_(self.head.weight)`, would write to an empty tensor, without an error and without effect.
    *Collective* over the world: all ranks run the same `configure_model`. A parameter stays gathered until another one
    is used, so that its `.data` can be written as well. Rank 0's values are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gathered: Any = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            touched = [
                value for value in (*args, *kwargs.values()) if isinstance(value, Parameter) and is_partitioned(value)
            ]
            if touched:
                self._gather(touched)
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._release()

    def _gather(self, parameters: list[Parameter]) -> None:
        from deepspeed.runtime.zero import GatheredParameters

        self._release()
        with DisableTorchFunctionSubclass(), scalars_as_bytes():
            self._gathered = GatheredParameters(parameters, modifier_rank=0)
            self._gathered.__enter__()

    def _release(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            with DisableTorchFunctionSubclass(), scalars_as_bytes():
                gathered.__exit__(None, None, None)


_HARMLESS = {
    getattr(Tensor, attribute).__get__
    for attribute in ("requires_grad", "device", "dtype", "is_leaf", "grad", "layout")
} | {Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]
