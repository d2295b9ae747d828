"""Harmless types in callbacks are restored, and saving other types warns."""

import warnings
from argparse import Namespace
from collections import Counter, OrderedDict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
from lightning.pytorch import Callback

from lightning_paral import CheckpointError
from tests.distributed.checkpoint.test_contents import FORMS, make
from tests.models.resumable import fit


class Keeping(Callback):
    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]


HARMLESS = {
    "numbers": (numpy.float64(1.5), numpy.int32(3), numpy.bool_(True), 1 + 2j, Decimal("1.25")),
    "times": (datetime(2026, 1, 2, tzinfo=UTC), timedelta(seconds=3), numpy.datetime64("2026-01-02")),
    "containers": (Counter("aab"), OrderedDict(b=2), {1, 2}, frozenset([3]), range(3)),
    "options": Namespace(lr=0.1, path=Path("data")),
}


@pytest.mark.parametrize("form", FORMS)
def test_harmless_types_are_restored(tmp_path: Path, form: str) -> None:
    array = numpy.arange(6, dtype="float32").reshape(2, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The checkpoint contains")
        fit(make("ddp", form), 1, save_to=tmp_path / "x.ckpt", callbacks=[Keeping(HARMLESS | {"array": array})])
    found = Keeping()
    fit(make("ddp", form), 1, resume_from=tmp_path / "x.ckpt", callbacks=[found])
    assert numpy.array_equal(found.kept.pop("array"), array)
    assert found.kept == HARMLESS


@pytest.mark.parametrize("form", FORMS)
def test_saving_other_types_warns(tmp_path: Path, form: str) -> None:
    with pytest.warns(UserWarning, match=r"The checkpoint contains fractions\.Fraction"):
        fit(make("ddp", form), 1, save_to=tmp_path / "x.ckpt", callbacks=[Keeping(Fraction(1, 3))])
    with pytest.raises(CheckpointError, match=r"fractions\.Fraction"):
        fit(make("ddp", form), 1, resume_from=tmp_path / "x.ckpt", callbacks=[Keeping()])
    trusted = Keeping()
    fit(make("ddp", form, weights_only=False), 1, resume_from=tmp_path / "x.ckpt", callbacks=[trusted])
    assert trusted.kept == Fraction(1, 3)


@pytest.mark.parametrize("form", FORMS)
def test_object_that_cannot_be_copied_fails_a_background_save(tmp_path: Path, form: str) -> None:
    with pytest.raises(CheckpointError, match=r"x\.ckpt failed: TypeError: cannot pickle 'generator'"):
        fit(
            make("ddp", form, async_save=True), 1, save_to=tmp_path / "x.ckpt", callbacks=[Keeping(x for x in range(3))]
        )
    assert not (tmp_path / "x.ckpt").exists()
