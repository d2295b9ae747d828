"""Different views of the same memory stay different in a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.checkpoint.test_contents import make
from tests.models.resumable import Resumable, fit


class Views(Resumable):
    """Buffers that are views of one tensor, with the same address, dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.randn(3, 3, dtype=torch.complex64)
        self.register_buffer("numbers", numbers)
        self.register_buffer("conjugated", numbers.conj())
        self.register_buffer("transposed", numbers.t())
        self.register_buffer("imaginary", numbers.imag)
        self.register_buffer("negated", numbers.conj().imag)

    def views(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in VIEWS}


VIEWS = ("numbers", "conjugated", "transposed", "imaginary", "negated")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("label", ["ddp", "fsdp"])
def test_views_are_restored(tmp_path: Path, label: str, form: Any, asynchronous: bool) -> None:
    options: dict[str, Any] = {"async_save": asynchronous}
    expected = fit(make(label, form, **options), 1, save_to=tmp_path / "x.ckpt", module=Views()).views()

    found = fit(make(label, form), 1, resume_from=tmp_path / "x.ckpt", module=Views()).views()

    for name, value in expected.items():
        assert torch.equal(found[name], value), name
