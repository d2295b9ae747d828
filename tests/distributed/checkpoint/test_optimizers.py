"""Optimizers with unusual state, such as lists of tensors and averages outside `state`, resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.checkpoint.test_contents import FORMS, make
from tests.models.resumable import Resumable, fit


class Lookahead(torch.optim.AdamW):
    """Lookahead (arXiv:1907.08610): pulls weights towards slow weights, which it saves outside `state`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.num_pulls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        fast = [p for group in self.param_groups for p in group["params"]]
        for mine, parameter in zip(self.slow, fast, strict=True):
            parameter.copy_(mine.lerp_(parameter, 0.5))
        self.num_pulls += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": dict(enumerate(self.slow)), "num_pulls": self.num_pulls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow, self.num_pulls = list(state_dict["slow"].values()), state_dict["num_pulls"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def lookahead(parameters: list[Tensor]) -> Any:
    return Lookahead(parameters, lr=1e-2)


def lbfgs(parameters: list[Tensor]) -> Any:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=3)


class With(Resumable):
    def __init__(self, make_optimizer: Any) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", [lookahead, lbfgs])
def test_optimizer_resumes(tmp_path: Path, form: str, optimizer: Any) -> None:
    losses = []
    for keep in ("save_to", "resume_from"):
        torch.manual_seed(3)
        losses.append(fit(make("ddp", form), 1, module=With(optimizer), **{keep: tmp_path / "x.ckpt"}).losses)  # type: ignore[arg-type]
    expected, found = losses
    assert found
    assert all(loss == pytest.approx(expected[number], rel=1e-5) for number, loss in found.items())
