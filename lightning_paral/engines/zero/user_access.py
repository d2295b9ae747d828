"""What user code does with the parameters of a run: it reaches the weights that DeepSpeed trains, or is an error.

DeepSpeed stores the values that it trains elsewhere: in fp32 master copies, and at stage 3 in each rank's shard, which
leaves an empty tensor in place of a parameter that is not in use. During a run, classes of this file replace
`torch.nn.Parameter`. They use no memory, and cost no time if only the forward passes of modules use a parameter:

- At stages 1 and 2, what user code has written to a parameter is compared at a *boundary*, an optimizer step, a save or
  the end of the run, with what DeepSpeed stores, and what differs is copied. All ranks run the same user code on full
  values, so that each rank copies its shard without communication.
- At stage 3, forward passes gather each parameter that they use. Elsewhere, using the values of a partitioned one is an
  error, and so is writing to any, except in `deepspeed.zero.GatheredParameters`.
- Reading `.grad`, which is not where gradients are, is an error.
"""

import re
import sys
from collections.abc import Callable
from traceback import walk_tb
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Module, Parameter

from lightning_paral.compat.deepspeed.engine import innermost_forward
from lightning_paral.compat.torch.autograd import before_transforms, version_of
from lightning_paral.compat.torch.tensors import tree_leaves, tree_map_only
from lightning_paral.engines.zero.partition import full_shape, is_partitioned, is_stage3_parameter
from lightning_paral.errors import ConfigurationError, ParalError

WriteBack = Callable[[list[tuple[Parameter, Tensor]]], None]
"""A function that takes parameters with full values, and copies this rank's shards of what differs to the weights."""

_WRITING = "deepspeed.zero.GatheredParameters(parameter, modifier_rank=0)"
_data: Any = Tensor.data
_grad: Any = Tensor.grad
# These need no values. Attributes that are no tensors need none either.
_METADATA_FUNCTIONS = {
    *(Tensor.requires_grad.__set__, Tensor.requires_grad_, Tensor.is_floating_point, Tensor.is_complex),  # type: ignore[attr-defined]
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
}
# These run on a meta tensor of the full shape.
_SHAPE_FUNCTIONS = {getattr(Tensor, attribute).__get__ for attribute in ("shape", "ndim", "nbytes")} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride, Tensor.is_contiguous),
    *(Tensor.element_size, torch.numel),
}


class HiddenGradientError(ParalError, RuntimeError):
    """User code read or set `parameter.grad`, which ZeRO does not use."""


def return_views(module: Module, inputs: Any, output: Any) -> Any:
    """Replace parameters that a module returns by views, which stay full when DeepSpeed frees the parameters."""
    return None if type(output) is Tensor else _with_views(output)


def _with_views(output: Any) -> Any:
    if not any(isinstance(leaf, Parameter) for leaf in tree_leaves(output)):
        return output
    return tree_map_only(Parameter, _full_view, output)


def _full_view(parameter: Any) -> Tensor:
    if is_partitioned(parameter):
        parameter._access.gather(parameter)
    view: Tensor = parameter.view_as(parameter)
    return view


class Steps(Module):
    """The root module of an engine, around a LightningModule, whose steps it runs.

    DeepSpeed's hooks on the root then run once per step, and those on the LightningModule when a step calls it. The
    output that they see is a list of tensors: steps may return anything, but hooks of stage 3 do not take numbers,
    strings, and dicts with other keys.
    """

    step: Callable[[], Any] | None = None
    outputs: list[Any]
    """The output of the last step. In a list, because torch would register a parameter."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the LightningModule, which user code expects in `trainer.model.module`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return that of the LightningModule, with its keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` returned."""
        return self.module.load_state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step that was set, and return the tensors in its output; without a step, call the module."""
        if self.step is None:
            return self.module(*args, **kwargs)
        self.outputs = [_with_views(self.step())]
        return [leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor)]


class UserAccess:
    """Makes what user code does with the parameters of `module` reach the weights, from construction to `end`.

    Args:
        module: the module.
        write_back: copies what user code has written to where DeepSpeed stores the weights.
        hides_gradients: whether reading `.grad` of a trained parameter is an error.
    """

    def __init__(self, module: Module, write_back: WriteBack, *, hides_gradients: bool) -> None:
        self.hides_gradients = hides_gradients
        self.write_back = write_back
        named = [pair for pair in module.named_parameters() if type(pair[1]).__torch_function__ is _PLAIN]
        self.names = {id(parameter): name for name, parameter in named}
        self._parameters: list[Any] = [parameter for _, parameter in named]
        self._versions: dict[int, int] = {}
        self._exposed: set[int] = set()
        """The `id`s of those whose `data` user code has got at stages 1 and 2, and may write to at any time."""
        self._undo = before_transforms(_refuse_partitioned)
        self.mark_unwritten()
        classes = {cls: self._classes(cls) for cls in {type(parameter) for parameter in self._parameters}}
        for parameter in self._parameters:
            full, gathered, partitioned = classes[type(parameter)]
            at_stage_3 = partitioned if is_partitioned(parameter) else gathered
            parameter.__class__ = at_stage_3 if is_stage3_parameter(parameter) else full

    def _classes(self, plain_class: type[Parameter]) -> tuple[type, type, type]:
        """Return what replaces `plain_class`: at stages 1 and 2, and for gathered and partitioned ones at stage 3."""
        members = {"__module__": plain_class.__module__, "plain_class": plain_class, "_access": self}
        name = plain_class.__name__
        made: Any = tuple(type(name, (mixin, plain_class), dict(members)) for mixin in (Full, Gathered, Partitioned))
        for cls in made:
            cls.classes = made
        return made  # type: ignore[no-any-return]

    def end(self, *, collect: bool) -> None:
        """Make the parameters ordinary ones again. With `collect`, copy what user code has written first."""
        try:
            if collect:
                self.collect()
        finally:
            self._undo()
            for parameter in self._parameters:
                parameter.__class__ = parameter.plain_class
            self._parameters = []

    # Boundaries

    def collect(self) -> None:
        """Copy what user code has written. No communication.

        Raises:
            ConfigurationError: it has written to a parameter of stage 3.
        """
        with torch.DisableTorchFunctionSubclass():
            exposed, versions = self._exposed, self._versions
            written = [p for p in self._parameters if id(p) in exposed or version_of(p) != versions[id(p)]]
        for parameter in written:
            if is_stage3_parameter(parameter):
                raise ConfigurationError(
                    f"{self.names[id(parameter)]!r}, or a tensor that has or had the same memory, was written to in a "
                    "step or hook. Under ZeRO stage 3 DeepSpeed moves parameters, so what is written would be lost. "
                    f"Write to it in {_WRITING}, or train with paral_zero2 or paral_fsdp."
                )
        self._copy(written)

    def mark_unwritten(self) -> None:
        """Treat the current values of parameters as those that DeepSpeed stores, as after loading a checkpoint."""
        self._record(self._parameters)

    def mark_stepped(self, parameters: list[Parameter]) -> None:
        """Tell autograd that `parameters` have changed: a backward pass of an earlier forward is then an error."""
        increment_version(parameters)
        self._record(parameters)

    def _record(self, parameters: list[Any]) -> None:
        with torch.DisableTorchFunctionSubclass():
            self._versions.update((id(parameter), version_of(parameter)) for parameter in parameters)

    def _copy(self, parameters: list[Any]) -> None:
        if parameters:
            with torch.no_grad():
                self.write_back([(parameter, plain_data(parameter)) for parameter in parameters])
            self._record(parameters)

    def copy_gathered(self, parameters: list[Any]) -> None:
        """Copy the values of parameters that were written to in `GatheredParameters`, which has broadcast them."""
        self._copy([parameter for parameter in parameters if not is_partitioned(parameter)])

    # Used by the classes below

    def gather(self, parameter: Any) -> None:
        """Gather a partitioned parameter, which the running forward pass uses, as DeepSpeed does. *Collective*.

        Raises:
            ConfigurationError: no forward pass of a module is running.
        """
        from deepspeed.runtime.zero import register_external_parameter

        module = innermost_forward()
        if module is None or not is_partitioned(parameter):
            raise ConfigurationError(
                f"{self.names[id(parameter)]!r} was used outside of the forward pass of a module, where each rank has "
                "only its shard of it under ZeRO stage 3. Read it with "
                "self.trainer.strategy.full_parameter(parameter), or a module with full_state_dict(part), write to it "
                f"in {_WRITING}, or train with paral_zero2 or paral_fsdp, where hooks use parameters as in one process."
            )
        register_external_parameter(module, parameter)
        parameter.all_gather()

    def expose(self, parameter: Any) -> Tensor:
        """Return `parameter.data` for user code, which may write to it.

        At stages 1 and 2, all boundaries compare its values from now on. At stage 3 it shares the version of
        `parameter`, which moves.
        """
        if is_partitioned(parameter):
            self.gather(parameter)
        if is_stage3_parameter(parameter):
            with torch.DisableTorchFunctionSubclass():
                return Tensor.detach(parameter)
        self._exposed.add(id(parameter))
        return plain_data(parameter)

    def assign(self, parameter: Any, values: Tensor) -> None:
        """Copy `values` into `parameter`, for `parameter.data = values`.

        Raises:
            ConfigurationError: they have another shape or dtype, or the parameter is partitioned.
        """
        shape = full_shape(parameter)
        if tuple(values.shape) != shape or values.dtype != parameter.dtype:
            raise ConfigurationError(
                f"{self.names[id(parameter)]!r} has shape {shape} and dtype {parameter.dtype}, and was given "
                f"values of shape {tuple(values.shape)} and dtype {values.dtype} in a hook or step. ZeRO shards "
                "parameters when the run begins: change shapes and dtypes before trainer.fit."
            )
        with torch.no_grad():
            self.expose(parameter).copy_(values)


class Full:
    """Mixin for a parameter whose `data` is full."""

    _access: UserAccess
    plain_class: type[Parameter]
    """The class that this one replaces."""
    classes: tuple[type, type, type]
    """The classes that replace it; see `UserAccess`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an ordinary parameter, because one that user code creates is not part of the run."""
        return cls.plain_class(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The full values. User code may write to them, except at stage 3."""
        return self._access.expose(self) if is_user_code() else plain_data(self)  # type: ignore[arg-type]

    @data.setter
    def data(self, values: Tensor) -> None:
        if is_user_code():
            self._access.assign(self, values)
            return
        with torch.DisableTorchFunctionSubclass():
            _data.__set__(self, values)

    @property
    def grad(self) -> Tensor | None:
        """The gradient. User code that reads or sets that of a trained parameter gets an error."""
        if self.requires_grad:  # type: ignore[attr-defined]
            self._hide_gradient()
        with torch.DisableTorchFunctionSubclass():
            gradient: Tensor | None = _grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._hide_gradient()
        with torch.DisableTorchFunctionSubclass():
            _grad.__set__(self, gradient)

    def _hide_gradient(self) -> None:
        if self._access.hides_gradients and is_user_code(3):
            raise HiddenGradientError(
                f"parameter.grad of {self._access.names[id(self)]!r} was read or set, but under ZeRO gradients are "
                "sharded, and not in parameter.grad. Read full gradients with "
                "`self.trainer.strategy.full_gradient(parameter)` and their norm with "
                "`self.trainer.strategy.gradient_norm()`, clip them with `self.clip_gradients(optimizer, ...)`, and "
                "zero them with `optimizer.zero_grad()`. To change them, change the loss, or train with paral_fsdp or "
                "paral_ddp."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        parameter: Any = self
        copied = Parameter(plain_data(parameter).clone(), parameter.requires_grad)
        return copied.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Gathered(Full):
    """Mixin for a parameter of stage 3 that is gathered now."""

    @property
    def ds_status(self) -> Any:
        """DeepSpeed's status of the parameter: gathered, being gathered, or partitioned."""
        return self.__dict__["ds_status"]

    @ds_status.setter
    def ds_status(self, status: Any) -> None:
        self.__dict__["ds_status"] = status
        _, gathered, partitioned = self.classes
        self.__class__ = gathered if status.name == "AVAILABLE" else partitioned

    @property
    def partition(self) -> Callable[..., Any]:
        """DeepSpeed's method that leaves this rank its shard of the parameter."""

        def run(param_list: Any = None, *args: Any, has_been_updated: bool = False, **options: Any) -> Any:
            if has_been_updated:
                self._access.copy_gathered(param_list or [self])
            return self.__dict__["partition"](param_list, *args, **options)

        return run

    def __deepcopy__(self, _: Any) -> NoReturn:
        raise ConfigurationError(
            f"{self._access.names[id(self)]!r} was copied, by copy.deepcopy or pickle, during a run at ZeRO stage 3, "
            "where a copy of a module would have DeepSpeed's hooks. Copy modules in __init__ or configure_model, or "
            "read parameters with self.trainer.strategy.full_parameter(parameter)."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__(protocol)


class Partitioned(Gathered):
    """Mixin for a parameter of stage 3 of which this rank has only its shard now.

    User code may use its metadata. An operation in a forward pass gathers it first; elsewhere it is an error.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch.DisableTorchFunctionSubclass():
            if func in _METADATA_FUNCTIONS or not is_user_code():
                return func(*args, **kwargs)
            if func in _SHAPE_FUNCTIONS:
                shape = torch.empty(full_shape(args[0]), dtype=args[0].dtype, device="meta")
                return func(shape, *args[1:], **kwargs)
            if getattr(func, "__name__", "") == "__get__" and not isinstance(found := func(*args, **kwargs), Tensor):
                return found
        for parameter in tree_leaves((args, kwargs)):
            if isinstance(parameter, Partitioned):
                parameter._access.gather(parameter)
        return func(*args, **kwargs)


def _refuse_partitioned(value: Any) -> None:
    if isinstance(value, Partitioned):
        raise ConfigurationError(
            f"{value._access.names[id(value)]!r} was given to a transform of torch.func, such as vmap or grad, while "
            "each rank had only its shard of it under ZeRO stage 3. Give it parameter.clone() in a step, or "
            "self.trainer.strategy.full_parameter(parameter) in a hook, or train with paral_zero2."
        )


def plain_data(parameter: Parameter) -> Tensor:
    """Return `parameter.data`, as it is now."""
    with torch.DisableTorchFunctionSubclass():
        values: Tensor = _data.__get__(parameter)
    return values


_ENGINE = ("deepspeed", "lightning_paral")


def is_user_code(depth: int = 2) -> bool:
    """Return whether the function `depth` frames up the stack is user code. Functions of torch are skipped.

    Functions of DeepSpeed and of this package are not user code. Those of Lightning are, because its callbacks act on
    parameters for the user.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch":
            return package not in _ENGINE
        frame = frame.f_back
    return True


_PLAIN: Any = Parameter.__torch_function__


# Errors that torch and DeepSpeed raise because parameters are partitioned

_SECOND_GRADIENT = (
    "Weights got gradients from a second backward pass, of which DeepSpeed supports one per step: from loss.backward() "
    "in a step, or from torch.utils.checkpoint with use_reentrant=True. For gradients by inputs, call "
    "torch.autograd.grad(loss, inputs); in manual optimization, self.manual_backward(loss)."
)
_EXPLANATIONS = {
    "Creating a Parameter from an instance of type": (
        "A parameter was created from one that ZeRO shards, as pruning, parametrizations and nn.Parameter(parameter) "
        "do. It would be neither sharded nor trained. Create it in __init__ or configure_model, or use paral_ddp."
    ),
    "Multiple gradient reductions? (is|are) currently not supported": _SECOND_GRADIENT,
}
_AT_STAGE_3 = {
    "does not have vmap support|with functorch transforms|has no attribute 'ds_(status|id)'|tracing error at step": (
        "Under ZeRO stage 3 a module must run as it is, with the same parameters and in the same order in each step, "
        "not in a transform of torch.func such as grad, jacrev and functional_call. Train with paral_zero2."
    ),
    r"tensor \w \(0\)|mat2 must be a matrix|weight' must be 2-D|of size 0\b|mismatch.* \(0\)|invalid storage offset": (
        "A weight was used while each rank had only its shard of it. Under ZeRO stage 3 weights are gathered for the "
        "forward pass and for one backward pass of their module. A second one, after backward(retain_graph=True) or "
        "through torch.autograd.grad(create_graph=True), finds only the shard. Train with paral_zero2, or paral_ddp."
    ),
}
"""Maps a pattern of torch's or DeepSpeed's message to what it means and what to do."""


def explanation(error: BaseException, *, stage: int) -> str | None:
    """Return what `error` means under ZeRO, and what to do; `None` if it has another cause."""
    if stage == 3 and isinstance(error, AttributeError) and error.name == "numel" and error.__traceback__ is not None:
        *_, (frame, _) = walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).startswith("deepspeed.runtime.zero"):
            return _SECOND_GRADIENT  # DeepSpeed found no gradient, because another backward pass has taken it
    known = _EXPLANATIONS | (_AT_STAGE_3 if stage == 3 else {})
    return next((meaning for pattern, meaning in known.items() if re.search(pattern, str(error))), None)
