"""Imports only go down the list of layers."""

import ast
from pathlib import Path

import pytest

import lightning_paral

ROOT = Path(lightning_paral.__file__).parent
LAYERS = (
    "__main__",
    "cli",
    "diagnostics",
    "__init__",
    "error_report",
    "registry",
    "other_trainers",
    "strategies",
    "callbacks",
    "planning",
    "engines",
    "averaging",
    "checkpoint",
    "data",
    "model",
    "comm",
    "distributed",
    "options",
    "option_types",
    "option_names",
    "compat",
    "tested_versions",
    "tables",
    "plots",
    "quantities",
    "_version",
    "suggestions",
    "errors",
)
MAY_READ_THE_WORLD = {
    "strategies/auto.py": "the memory of all ranks decides",
    "strategies/description.py": "makes the dimensions of a run",
    "strategies/fsdp.py": "makes the dimensions of a run",
    "strategies/pipeline.py": "makes the dimensions of a run",
    "strategies/counted_flops.py": "one rank counts for all",
    "strategies/zero.py": "makes the dimensions of a run, and tells DeepSpeed about all ranks",
    "strategies/after_failure.py": "whether ranks fail alone or together concerns all of them",
    "strategies/collectives.py": "whether ranks fail alone or together concerns all of them",
    "callbacks/auto_resume.py": "tells the user if the number of ranks has changed",
    "callbacks/monitor.py": "every rank reports its times, whatever it holds",
    "callbacks/preemption.py": "several ranks have to agree, whatever they hold",
    "planning/fit.py": "plans for all ranks",
    "checkpoint/state/ended_optimizers.py": "the process group may be another one than that of the run that ended",
    "data/exact_evaluation.py": "names a rank in an error",
    "data/logged_keys.py": "names a rank in an error",
    "data/predictions.py": "strategies of others have no dimensions",
    "engines/ddp/run.py": "names a rank in an error",
    "engines/pipeline/ended_state.py": "the process group may be another one than that of the run that ended",
    "engines/zero/engine/construction.py": "DeepSpeed shards over the world",
    "engines/zero/state/averaged_shards.py": "DeepSpeed shards over the world",
    "engines/zero/training/usage.py": "DeepSpeed shards over the world",
}
"""Files outside of `distributed`, `comm`, `compat` and `cli` that ask for the world size or the global rank."""
FILES = sorted(ROOT.rglob("*.py"))


def layer_of(module: str) -> int:
    """Return the layer of a module, given by its dotted name below `lightning_paral`. The empty name is the package."""
    return LAYERS.index(module.split(".")[0] or "__init__")


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return {name.removeprefix("lightning_paral").lstrip(".") for name in modules if name.startswith("lightning_paral")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_down(path: Path) -> None:
    own = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")

    for imported in imported_modules(path):
        assert layer_of(imported) >= layer_of(own), f"{own} imports lightning_paral.{imported}, which lies above it"


@pytest.mark.parametrize("engine", sorted(path.parent.name for path in (ROOT / "engines").glob("*/__init__.py")))
def test_engines_do_not_import_each_other(engine: str) -> None:
    for path in (ROOT / "engines" / engine).rglob("*.py"):
        engines = {module.split(".")[1] for module in imported_modules(path) if module.startswith("engines.")}
        assert engines <= {engine}, f"{path.relative_to(ROOT)} imports another engine"


def test_files_hold_one_idea_each() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "helpers", "common")]


def reads_the_world(path: Path) -> bool:
    """Return whether a file asks for the world size or the global rank of a run."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("world_size", "global_rank"):
            owner = ast.unparse(node.value).split(".")[-1]
            if owner in ("trainer", "_trainer", "strategy", "_strategy") or (
                owner == "self" and path.parent.name == "strategies"
            ):
                return True
        called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if called in ("get_world_size", "get_rank") and not (node.args or node.keywords):  # type: ignore[attr-defined]
            return True
    return False


def test_only_parallel_dims_decide_which_ranks_draw_samples_and_hold_replicas() -> None:
    rooms = ("distributed", "comm", "compat", "cli")
    files = {path.relative_to(ROOT).as_posix(): path for path in FILES if path.relative_to(ROOT).parts[0] not in rooms}

    assert {name for name, path in files.items() if reads_the_world(path)} == set(MAY_READ_THE_WORLD)
