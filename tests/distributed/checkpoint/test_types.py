"""Saving objects that loading would refuse warns."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from tests.models.resumable import losses, refusal

FORMS = ("full", "sharded")


class Keeping(Callback):
    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]


@pytest.mark.parametrize("form", FORMS)
def test_saving_other_types_warns(tmp_path: Path, form: str) -> None:
    path = tmp_path / "x.ckpt"
    with pytest.warns(UserWarning, match=r"The checkpoint contains fractions\.Fraction"):
        losses("paral_ddp", checkpoint=form, save_to=path, callbacks=[Keeping(Fraction(1, 3))])
    assert "fractions.Fraction" in refusal("paral_ddp", resume_from=path, callbacks=[Keeping()])
    trusted = Keeping()
    losses("paral_ddp", checkpoint={"weights_only": False}, resume_from=path, callbacks=[trusted])
    assert trusted.kept == Fraction(1, 3)


@pytest.mark.parametrize("form", FORMS)
def test_object_that_cannot_be_copied_fails_a_background_save(tmp_path: Path, form: str) -> None:
    callbacks, checkpoint = [Keeping(x for x in range(3))], {"form": form, "async_save": True}
    message = refusal("paral_ddp", checkpoint=checkpoint, save_to=tmp_path / "x.ckpt", callbacks=callbacks)
    assert "x.ckpt failed: TypeError: cannot pickle 'generator'" in message
    assert not (tmp_path / "x.ckpt").exists()
