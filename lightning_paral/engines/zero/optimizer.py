"""The optimizer of a fit: what DeepSpeed can step with, its groups, and the sharded gradients, from backward to step.

DeepSpeed replaces the parameters in the groups of its optimizer by flat tensors. User code, schedulers and callbacks
would find these in `optimizer.param_groups`. Outside of steps the optimizer therefore has the groups of the user, whose
hyper-parameters are copied to those of DeepSpeed before each step.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Adam, AdamW, Optimizer

from lightning_paral.checkpoint.optimizer_state import param_names
from lightning_paral.compat.deepspeed.engine import scaled_norm
from lightning_paral.compat.lightning.strategies import is_mock_optimizer
from lightning_paral.compat.torch import optimizers
from lightning_paral.distributed.exchange import gather_ints
from lightning_paral.engines.zero.user_access import UserAccess
from lightning_paral.errors import ConfigurationError, ParalError, UnusedParametersError
from lightning_paral.model.requires_grad import TrainedParameters, first_names

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_ELEMENTWISE = ("Adadelta", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""The optimizers of `torch.optim` that update each element of a parameter by its own gradient and state."""


_NO_HYPER_PARAMETERS = ("params", "param_names")


class UsersOptimizer:
    """The optimizer that `configure_optimizers` returned.

    Args:
        optimizer: the user's optimizer.
        module: the module that contains its parameters, for their names.
        lost: why its states were lost at the end of an earlier run; `None` if they were not.
        on_cpu: whether the optimizer runs on the CPU.

    Raises:
        ConfigurationError: no group has a trained parameter, or the optimizer has states, or had some.
    """

    def __init__(self, optimizer: Optimizer, module: Module, lost: str | None = None, *, on_cpu: bool = False) -> None:
        self.optimizer = optimizer
        self._on_cpu = on_cpu
        self.groups = optimizer.param_groups
        self.names = param_names(optimizer, module)
        self._first_parameters = self._parameter_ids()
        if lost is not None or any(optimizer.state.values()):
            reason = f", and its state was lost: {lost}" if lost else ", from steps or load_state_dict before the run"
            raise ConfigurationError(
                f"{type(optimizer).__name__} already has states{reason}. ZeRO would begin without them. Resume "
                "with trainer.fit(ckpt_path=...), return a new optimizer from configure_optimizers, or train with "
                "paral_ddp."
            )
        # DeepSpeed drops groups without trained parameters, and takes the dtype of gradients from the first parameter.
        trained = [(group, [each for each in group["params"] if each.requires_grad]) for group in self.groups]
        self._pairs = [(group, group | {"params": parameters}) for group, parameters in trained if parameters]
        self.flat_groups = [flat for _, flat in self._pairs]
        """The groups of DeepSpeed, which replaces their parameters by flat tensors."""
        self.flat_state: defaultdict[Tensor, Any] = defaultdict(dict)
        """The states of the flat tensors."""
        if not self._pairs:
            raise ConfigurationError(
                "No parameter of the optimizer requires a gradient: there is nothing to train. Unfreeze a parameter, "
                "or return None from configure_optimizers."
            )
        self._shown = {"param_groups": self.groups, "state": _HiddenState()}
        self._users_state = optimizer.state
        vars(optimizer).update(self._shown)

    def _parameter_ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.optimizer.param_groups]

    @contextmanager
    def flat(self) -> Iterator[Optimizer]:
        """Give the optimizer DeepSpeed's groups and states inside this context."""
        optimizer = self.optimizer
        vars(optimizer).update(param_groups=self.flat_groups, state=self.flat_state)
        try:
            yield optimizer
        finally:
            self.flat_groups, self.flat_state = optimizer.param_groups, optimizer.state
            vars(optimizer).update(self._shown)

    def with_hooks(self, step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """Return `step(optimizer, closure=closure)`, with the step hooks of the user's optimizer around it."""
        result = optimizers.step_with_hooks(self.optimizer, step, (), {"closure": closure})
        optimizers.mark_stepped(self.optimizer)
        return result

    def check_fixed(self) -> None:
        """Raise a `ConfigurationError` if user code has changed how the optimizer steps since the run began."""
        own = vars(self.optimizer)
        step_module = getattr(own.get("step", Optimizer.step), "__globals__", {}).get("__name__", "")
        is_same = self._parameter_ids() == self._first_parameters
        is_shown = all(own[key] is shown for key, shown in self._shown.items())
        if not is_same or not is_shown or step_module.partition(".")[0] != "torch":  # whose schedulers wrap it
            raise ConfigurationError(
                "During the run the optimizer got other parameters, its state or its param_groups was replaced, as by "
                "optimizer.load_state_dict, or its step was replaced by another function. ZeRO shards parameters and "
                "states when the run begins, and steps on flat tensors. Give it all parameters in configure_optimizers,"
                " change groups in place, use optimizer.register_step_post_hook, resume with "
                "trainer.fit(ckpt_path=...), or train with paral_fsdp."
            )

    def step(self, run: Callable[[], Any], *, counts: bool) -> None:
        """Call `run`, in which DeepSpeed steps, with the current hyper-parameters.

        Args:
            run: the step of DeepSpeed.
            counts: whether DeepSpeed runs the optimizer once for each group, so that it may change their entries.

        Raises:
            ConfigurationError: the optimizer has changed entries of its groups, without `counts`.
        """
        for users, flat in self._pairs:
            flat.update({key: value for key, value in users.items() if key not in _NO_HYPER_PARAMETERS})
            if self._steps_fused(flat):
                flat["fused"] = True
        before = [set(flat) for _, flat in self._pairs]
        with optimizers.without_hooks(self.optimizer), self.flat():  # DeepSpeed steps group by group
            run()
        for (users, flat), known in zip(self._pairs, before, strict=True):  # some optimizers change or add entries
            theirs = [key for key in flat if key in users or key not in known]
            now = {key: flat[key] for key in theirs if key not in (*_NO_HYPER_PARAMETERS, "fused")}
            changed = [key for key, value in now.items() if users.get(key) is not value and users.get(key) != value]
            if changed and not counts:
                raise ConfigurationError(
                    f"{type(self.optimizer).__name__} changes {first_names(changed)} of its param_groups in a step, as "
                    "if to count steps. At stage 3 DeepSpeed runs it several times for each step, so it would count "
                    "too far. Train with paral_zero2 or paral_fsdp."
                )
            users.update(now)

    def _steps_fused(self, flat: dict[str, Any]) -> bool:
        """Return whether to choose torch's fused kernel, which needs no temporary tensors of the size of the shard."""
        if not self._on_cpu or type(self.optimizer) not in (Adam, AdamW):
            return False
        return flat["fused"] is None and flat["foreach"] is None and not flat["differentiable"]

    def restore(self) -> None:
        """Remove DeepSpeed's state from the optimizer."""
        self.optimizer.state = self._users_state


class _HiddenState(MutableMapping[Any, Any]):
    """Takes the place of `optimizer.state` outside of DeepSpeed's steps. Every use is an error."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            "optimizer.state was used, as also by optimizer.state_dict(), but under ZeRO each rank has a part of the "
            "states, of flat tensors. Read one with `self.trainer.strategy.full_optimizer_state(parameter, key)`, save "
            "all with trainer.save_checkpoint, or train with paral_fsdp."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _refuse


def check_optimizers(optimizers: list[Any], module: LightningModule, *, trust: bool = False) -> Optimizer | None:
    """Return the user's optimizer if ZeRO can shard it; `None` if `configure_optimizers` returned `None`.

    Args:
        optimizers: what `configure_optimizers` returned.
        module: the module.
        trust: whether to accept an optimizer that is not known to be elementwise.

    Raises:
        ConfigurationError: `configure_optimizers` returned an empty list, several, or what ZeRO cannot shard.
    """
    name = type(module).__name__
    if len(optimizers) == 1 and is_mock_optimizer(optimizers[0]):
        return None
    if not optimizers:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned an empty list. Return an optimizer, or None to run without one."
        )
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"{name}.configure_optimizers returned {len(optimizers)} optimizers, and DeepSpeed trains with one. Train "
            "with paral_fsdp, which shards the same."
        )
    (optimizer,) = optimizers
    class_name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, torch.optim.Adagrad | torch.optim.LBFGS):
        raise ConfigurationError(
            f"DeepSpeed does not run {type(optimizer).__name__} as torch does: it replaces Adagrad by one with default "
            "options, and LBFGS needs several backward passes per step. Train with paral_fsdp or paral_ddp."
        )
    known = type(optimizer) in (getattr(torch.optim, known) for known in _ELEMENTWISE)
    trusted = trust and isinstance(optimizer, Optimizer)
    if not (trusted or known or class_name.startswith(("deepspeed.ops.adam.", "deepspeed.ops.lion."))):
        raise ConfigurationError(
            f"{class_name} may not be elementwise. ZeRO gives an optimizer flat tensors that are cut at any element, "
            "so it must update each element by its own gradient and state alone. If it does, as Lion, set "
            "ParalZeROStrategy(trust_optimizer=True). If it computes norms, means or products over parameters, as LAMB "
            f"and Adafactor, train with paral_fsdp or paral_ddp. Known to be elementwise: {', '.join(_ELEMENTWISE)}."
        )
    return optimizer  # type: ignore[no-any-return]


_INSTEAD = "Make the loss depend on all of them in every backward pass, or train with paral_fsdp."


class BackwardOrder:
    """Records the order in which trained parameters get gradients, from construction to `end`.

    Args:
        module: the module when the run begins.
        trained: the parameters that the optimizer trains, by name.
        matters: whether gradients are reduced in the order in which they come. Otherwise only missing ones are refused.
    """

    def __init__(self, module: Module, trained: Mapping[str, Parameter], *, matters: bool) -> None:
        self._matters = matters
        self._names = list(trained)
        self._numbers = {id(parameter): number for number, parameter in enumerate(trained.values())}
        self._undo = ExitStack()
        self._tracked = TrainedParameters(module, self._undo)
        self._at_start = self._tracked.by_name
        self._order: list[int] = []
        self._agreed: list[list[int] | None] = []
        """For each backward pass of a window, the order in the first window that had as many passes; `None` if the
        ranks differed, or a parameter was missing."""
        self._is_running = False
        self.has_outside_gradients = False
        """Whether parameters got gradients in a backward pass that the strategy did not run."""
        for parameter in trained.values():
            handle = parameter.register_post_accumulate_grad_hook(self._record)  # type: ignore[no-untyped-call]
            self._undo.callback(handle.remove)

    def covers(self, parameter: Parameter) -> bool:
        """Return whether the optimizer trains `parameter`."""
        return id(parameter) in self._numbers

    def check_fixed(self) -> None:
        """Raise a `ConfigurationError` if a parameter that requires a gradient did not when the run began."""
        with torch.DisableTorchFunctionSubclass():  # reading attributes of partitioned parameters is slow otherwise
            if not self._tracked.have_changed():
                return
            now = self._tracked.current_by_name()
            self._tracked.update()
        added = [name for name, p in now.items() if p.requires_grad and self._at_start.get(name) is not p]
        if added:
            raise ConfigurationError(
                "These parameters require a gradient now, but were frozen or not in the module when the run began: "
                f"{first_names(added)}. ZeRO shards only what is trained from the beginning. Train with paral_fsdp or "
                "paral_ddp."
            )

    def _record(self, parameter: Tensor) -> None:
        if self._is_running:
            self._order.append(self._numbers[id(parameter)])
        else:
            self.has_outside_gradients = True

    def begin_pass(self) -> None:
        """Begin to record a backward pass."""
        self._is_running, self._order = True, []

    def end_pass(self, number: int) -> None:
        """Check the backward pass, the one with this `number` in its window. *Collective* if no window had so many.

        Raises:
            UnusedParametersError: a trained parameter got no gradient, the ranks differ, or the order has changed.
        """
        self._is_running = False
        if not self._matters:
            self._order.sort()
        if number == len(self._agreed):
            digests = gather_ints(zlib.crc32(repr(self._order).encode()))
            is_complete = len(set(self._order)) == len(self._names)
            self._agreed.append(self._order if is_complete and len(set(digests)) == 1 else None)
        if self._order == self._agreed[number]:
            return
        got = set(self._order)
        missing = [name for number, name in enumerate(self._names) if number not in got]
        if missing:
            raise UnusedParametersError(
                f"These parameters got no gradient in a backward pass: {first_names(missing)}. torch's optimizers skip "
                "them, but ZeRO steps on flat tensors and would change them. If they are never used, freeze them with "
                f"requires_grad_(False) before the run, not in it. {_INSTEAD}"
            )
        raise UnusedParametersError(
            "Gradients came in a different order than on other ranks, or than in an earlier step. ZeRO matches the "
            f"gradients of the ranks by position, so it would add up those of different parameters. {_INSTEAD}"
        )

    def end(self) -> None:
        """Stop recording."""
        self._undo.close()


class DynamicLossScale:
    """A loss scale that changes like that of `torch.amp.GradScaler`.

    If gradients are not finite, the step is skipped and the scale is halved. After 2000 finite steps in a row it is
    doubled. Follows Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740. DeepSpeed's own is not used:
    under fp16 autocast, version 0.19.8 clips gradients without unscaling them, and never lowers the scale; with fp16
    weights, it halves the gradients of each step in which it doubles the scale.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.state: dict[str, Any] = {
            "scale": scale, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": growth_interval,
            "_growth_tracker": 0,
        }  # fmt: skip
        """The state, as `torch.amp.GradScaler.state_dict` returns it."""

    def update(self, *, is_finite: bool) -> None:
        """Halve the scale if gradients are not finite, double it if enough steps were."""
        state = self.state
        state["_growth_tracker"] = state["_growth_tracker"] + 1 if is_finite else 0
        if not is_finite:
            state["scale"] = max(state["scale"] * state["backoff_factor"], 1.0)
        elif state["_growth_tracker"] >= state["growth_interval"]:
            state.update(scale=state["scale"] * state["growth_factor"], _growth_tracker=0)


class GradientsNotReadyError(ParalError, RuntimeError):
    """Sharded gradients were read while they were still being accumulated, or after the step that used them."""


class Gradients:
    """The gradients of one fit.

    A *window* is all backward passes whose gradients are added up for one step. Under automatic optimization its last
    pass is known in advance. Under manual optimization the step ends it.

    Args:
        engine: the DeepSpeed engine that reduces the gradients and steps with them.
        users: the user's optimizer.
        access: copies what user code has written to parameters to the weights that the step updates.
        module: the module.
        trained: the parameters that the optimizer trains, by name.
    """

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        users: UsersOptimizer,
        access: UserAccess,
        module: Module,
        trained: Mapping[str, Parameter],
    ) -> None:
        self.engine = engine
        self._users = users
        self._access = access
        self._trained = list(trained.values())
        self._stage: int = engine.zero_optimization_stage()
        in_order = self._stage > 1 or bool(engine.zero_overlap_comm())
        self._order = BackwardOrder(module, trained, matters=in_order)
        self._num_passes = 0
        self._is_complete = False
        """Whether the gradients of the window are averaged over the ranks, or will be by the running backward pass."""
        self._is_used = False
        """Whether a step has used the gradients of a window that have not been zeroed since."""
        self.loss_scale: DynamicLossScale | None = None
        """By what losses are multiplied in fp16."""
        self._optimizer.clip_grad = 0.0

    @property
    def _optimizer(self) -> Any:
        return self.engine.optimizer

    def check_fixed(self) -> None:
        """Raise a `ConfigurationError` if a parameter has been unfrozen or added."""
        self._order.check_fixed()

    def end(self) -> None:
        """Stop checking backward passes."""
        self._order.end()

    # A window

    def before_backward(self, *, ends_window: bool) -> None:
        """Prepare for a backward pass.

        Args:
            ends_window: whether this pass is known to be the last of its window.

        Raises:
            ConfigurationError: the gradients of the last step were not zeroed, or those of this one were read already.
        """
        if self._is_used:
            raise ConfigurationError(
                "The gradients of the last step were not zeroed before this backward pass. torch would add to them, "
                "but under ZeRO they are freed after the step. Call optimizer.zero_grad() before the backward passes "
                "of each step, also in an overridden optimizer_zero_grad, or train with paral_fsdp."
            )
        if self._is_complete:
            raise ConfigurationError(
                "A backward pass ran after gradients of the same step were read or clipped. ZeRO averages gradients "
                "once per step: read and clip them after the last backward pass, or train with paral_fsdp."
            )
        self.engine.set_gradient_accumulation_boundary(ends_window)
        self._optimizer.clear_backward_seen_flag()  # `engine.forward` does so only for the first pass after it
        if self.loss_scale is not None:
            self._optimizer.override_loss_scale(float(self.loss_scale.state["scale"]))
        self._order.begin_pass()
        self._num_passes += 1
        self._is_complete = ends_window

    def after_backward(self) -> None:
        """Check the backward pass.

        Raises:
            UnusedParametersError: see `BackwardOrder.end_pass`.
        """
        self._order.end_pass(self._num_passes - 1)

    def end_window(self) -> None:
        """Average the gradients of the window, unless its last backward pass has done so. *Collective*."""
        if self._is_complete or self._num_passes == 0:
            return
        self._is_complete = True
        self.engine.set_gradient_accumulation_boundary(True)
        if self._stage >= 2:
            self._optimizer.finalize_gradient_accumulation_boundary()
        else:
            self.engine.allreduce_gradients()

    def step(self, closure: Callable[[], Any]) -> Any:
        """Return the result of `closure`, after a step with the gradients of its backward pass. *Collective*.

        This rank's shards of the parameters are updated, and all ranks use the new values. Step hooks run around both.

        Raises:
            ConfigurationError: gradients came from a backward pass that the strategy did not run, or those of the last
                step were not zeroed. Or the optimizer has changed.
        """
        return self._users.with_hooks(self._step, closure)

    def _step(self, _: Optimizer, closure: Callable[[], Any]) -> Any:
        result = closure()
        if self._order.has_outside_gradients:
            raise ConfigurationError(
                "Gradients came from loss.backward(), which ZeRO does not see: ranks would not average them. Call "
                "self.manual_backward(loss) instead, or train with paral_fsdp."
            )
        if self._is_used:
            raise ConfigurationError(
                "Two steps ran without zero_grad or a backward pass between them. torch would use the same gradients "
                "again, but under ZeRO they are freed after the step. Train with paral_fsdp."
            )
        self._users.check_fixed()
        if self._num_passes == 0:  # training_step returned None: torch's optimizers would not change anything
            return result
        self._access.collect()
        self.engine.set_gradient_accumulation_boundary(True)
        self._users.step(self.engine.step, counts=self._stage < 3)
        self._access.mark_stepped(self._trained)
        is_finite = self.engine.was_step_applied()
        if self.loss_scale is not None:
            self.loss_scale.update(is_finite=is_finite)
        elif not is_finite:
            rank_zero_warn("Gradients were not finite: DeepSpeed skipped this step, so parameters did not change.")
        self._optimizer.clip_grad = 0.0  # none
        self._is_used, self._is_complete, self._num_passes = True, False, 0
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a new window after a step.

        Raises:
            ConfigurationError: no step has used the gradients of the last backward passes.
        """
        if self._num_passes:
            raise ConfigurationError(
                "zero_grad was called after a backward pass and before the step that uses its gradients. DeepSpeed "
                "cannot drop gradients: decide before the backward pass, or train with paral_fsdp."
            )
        self._is_used = False

    # Clipping and reading

    def clip_by_norm(self, max_norm: float) -> None:
        """Scale the averaged gradients, if there are any, in the next step to a 2-norm of at most `max_norm`."""
        if self._num_passes:
            self.end_window()
            self._optimizer.clip_grad = min(self._optimizer.clip_grad or math.inf, max_norm)

    def norm(self) -> Tensor:
        """Return the global 2-norm of the averaged gradients before clipping by norm: a scalar, fp32. *Collective*."""
        self._check_complete()
        return scaled_norm(self._optimizer, self._stage) / float(self._optimizer.loss_scale)

    def full(self, parameter: Parameter) -> Tensor | None:
        """Return the full averaged gradient of `parameter` in fp32; `None` if it is not trained. *Collective*."""
        from deepspeed.utils import safe_get_full_grad

        self._check_complete()
        gradient = safe_get_full_grad(parameter) if self._order.covers(parameter) else None
        return None if gradient is None else gradient.float() / float(self._optimizer.loss_scale)

    def _check_complete(self) -> None:
        from deepspeed.accelerator import get_accelerator

        self.end_window()
        if not self._is_complete:
            raise GradientsNotReadyError(
                "There are no gradients now: they exist from the last backward pass of a step to the step itself. "
                "Read them in on_before_optimizer_step or configure_gradient_clipping."
            )
        if self._stage < 3 and self.engine.zero_offload_optimizer() is not None:
            get_accelerator().synchronize()  # with copies to host memory
