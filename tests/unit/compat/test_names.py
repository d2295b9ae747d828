"""Canaries: every private name that `lightning_paral.compat` uses exists and has the expected parameters."""

import ast
import importlib
import logging
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

import lightning_paral.compat
from lightning_paral.compat import private_name
from lightning_paral.compat.private_name import PrivateName, entries
from lightning_paral.engines.zero.process import choose_accelerator, quiet_deepspeed
from lightning_paral.errors import PrivateNameError
from tests.source import PACKAGE, trees
from tests.unit.compat.test_private_names import LIBRARIES, OF_PYTHON, OWN, is_private

MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(lightning_paral.compat.__path__, "lightning_paral.compat.")
    if not info.ispkg and not info.name.endswith(".private_name")
]
ENTRIES = [entry for module in MODULES for entry in entries(getattr(module, "NAMES", {}))]


def import_deepspeed() -> None:
    """Import DeepSpeed as the strategies do on CPU, even if there are GPUs, and suppress its messages."""
    with quiet_deepspeed(logging.ERROR):
        choose_accelerator(torch.device("cpu"))


def wrong_with(entry: PrivateName) -> str:
    """Return what is wrong with an entry, or an empty text."""
    explained = entry.purpose and entry.name.partition(".")[0] in (*LIBRARIES, *sys.stdlib_module_names)
    try:
        if entry.is_used:
            entry.resolve()
    except PrivateNameError as error:
        return str(error)
    return "" if explained else f"{entry.name} is not explained"


def test_private_names_exist_and_are_explained() -> None:
    import_deepspeed()

    wrong = [said for entry in ENTRIES if (said := wrong_with(entry))]

    assert not wrong, "\n".join(wrong)


def private_names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the private attributes that are used, and what is imported privately from other packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_paral"):
            path = (node.module or "").split(".")
            yield from (alias.name for alias in node.names if any(map(is_private, [*path, alias.name])))


@pytest.mark.source
def test_modules_declare_the_names_they_use() -> None:
    undeclared = []
    for module in MODULES:
        declared = {part for entry in entries(getattr(module, "NAMES", {})) for part in entry.name.split(".")}
        tree = trees()[Path(str(module.__file__)).relative_to(PACKAGE).as_posix()]
        if missing := set(private_names_in(tree)) - declared - OWN - OF_PYTHON:
            undeclared.append(f"{module.__name__}: {', '.join(sorted(missing))}")

    assert not undeclared, "\n".join(["private names without an entry in NAMES:", *undeclared])


def entry(name: str, parameters: tuple[str, ...] = ()) -> PrivateName:
    return PrivateName(name=name, purpose="show this", parameters=parameters)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (entry("torch.nn.Module._gone"), "torch.nn.Module._gone to show this, but in torch .* no such name"),
        (
            PrivateName(name="torch.nn.Module._gone", purpose="show this", on_instances=True),
            "torch.nn.Module._gone to show this, but in torch .* torch.nn.Module has no attribute of that name",
        ),
        (
            PrivateName(name="torch.nn.Module._non", purpose="show this", on_instances=True),  # a part of others
            "torch.nn.Module has no attribute of that name",
        ),
        (
            entry("torch.nn.Module.register_buffer", ("name", "colour")),
            r"takes \(self, name, tensor, persistent\), not \('name', 'colour'\)",
        ),
    ],
)
def test_missing_name_and_changed_parameters_raise(wrong: PrivateName, message: str) -> None:
    with pytest.raises(PrivateNameError, match=message):
        wrong.resolve()


@pytest.mark.parametrize("strategy", ["paral_dp", "paral_ddp", "paral_fsdp", "paral_zero2"])
def test_missing_name_raises_before_training(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    private_name.check_names.cache_clear()
    monkeypatch.setattr(private_name, "entries", lambda names: (entry("torch.nn.Module._gone"),))

    with pytest.raises(PrivateNameError, match=r"torch\.nn\.Module\._gone to show this"):
        Trainer(strategy=strategy, devices=1, accelerator="cpu", logger=False, barebones=True)


def test_wrappers_that_take_any_argument_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.nn.Module._load_from_state_dict
    monkeypatch.setattr(torch.nn.Module, "_load_from_state_dict", lambda *args, **kwargs: plain(*args, **kwargs))

    entry("torch.nn.Module._load_from_state_dict", ("self", "state_dict")).resolve()
