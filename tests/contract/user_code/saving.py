"""Rows about checkpoints: overrides of state_dict, extra state, hooks that add and remove entries."""

from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn

from tests.contract.user_code.models import Momentum, Supervised
from tests.contract.user_code.rows import row


@row("saving, tensors added", resumed=True)
class Added(Supervised):
    """checkpoint["user_..."] = tensors and numbers in on_save_checkpoint, read back in on_load_checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3)

    def on_train_batch_end(self, *args: Any) -> None:
        self.total += 1

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["user_total"] = self.total
        checkpoint["user_note"] = {"steps": self.global_step, "names": ["a", "b"]}

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.total = checkpoint["user_total"].clone()


class StatefulCallback(Callback):
    def __init__(self) -> None:
        self.best: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self.best is None:
            self.best = pl_module.head.weight.detach().clone()
        self.best = self.best * 0.5 + 0.5 * pl_module.head.weight.detach()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.seen.append(float(self.best.sum()))

    def state_dict(self) -> Any:
        return {"best": self.best}

    def load_state_dict(self, state: Any) -> None:
        self.best = state["best"]


row(
    "saving, a callback's state of weights",
    sentence="Callback.state_dict with tensors made from weights, over a resume.",
    callbacks=lambda: [StatefulCallback()],
    resumed=True,
)(Supervised)


@row("saving, keys renamed")
class Renamed(Supervised):
    """checkpoint["state_dict"] rebuilt with other keys in on_save_checkpoint."""

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["state_dict"] = {f"module.{key}": value for key, value in checkpoint["state_dict"].items()}


@row("saving, get_extra_state", resumed=True)
class Extra(Supervised):
    """get_extra_state and set_extra_state of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.head = WithExtra()

    def on_train_batch_end(self, *args: Any) -> None:
        self.head.count += 1

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.head.count)


class WithExtra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(7, 3)
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


@row("saving, state_dict overridden", resumed=True)
class Overridden(Momentum):
    """state_dict overridden to leave out the teacher; load_state_dict(strict=False)."""

    strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("target.")}


@row("saving, load_state_dict overridden", resumed=True)
class OwnLoad(Supervised):
    """load_state_dict overridden to rename keys that state_dict of the same class writes."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"net_{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        renamed = {name.removeprefix("net_"): value for name, value in state_dict.items()}
        return super().load_state_dict(renamed, *args, **kwargs)


@row("saving, state_dict hooks", resumed=True)
class Hooked(Supervised):
    """register_state_dict_post_hook and register_load_state_dict_pre_hook that rename and scale."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_state_dict_post_hook(self._after)
        self.head.register_load_state_dict_pre_hook(self._before)

    @staticmethod
    def _after(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight")

    @staticmethod
    def _before(module: Any, state: Any, prefix: str, *args: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")
