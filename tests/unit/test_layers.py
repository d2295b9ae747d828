"""Imports only go down the list of layers."""

import ast
from collections.abc import Iterator

import pytest

from tests.source import trees

pytestmark = pytest.mark.source

LAYERS = (
    "__main__",
    "cli",
    "__init__",
    "diagnostics",
    "error_report",
    "registry",
    "strategies",
    "callbacks",
    "engines",
    "planning",
    "averaging",
    "checkpoint",
    "data",
    "model",
    "comm",
    "distributed",
    "options",
    "option_types",
    "compat",
    "tested_versions",
    "tables",
    "quantities",
    "_version",
    "suggestions",
    "errors",
)
MAY_READ_THE_WORLD = {
    "make the dimensions of a run": (
        "strategies/base.py strategies/fsdp.py strategies/local_sgd.py strategies/pipeline.py"
    ),
    "tells DeepSpeed about all ranks": "strategies/zero.py",
    "plan or count for all ranks": "strategies/auto.py planning/plan.py planning/follow.py",
    "end ranks together": "strategies/run_watch.py",
    "tells whether the number of ranks has changed": "callbacks/auto_resume.py",
    "concern every rank, whatever it holds": "callbacks/monitor.py callbacks/preemption.py",
    "may meet another process group": (
        "checkpoint/ended_optimizers.py checkpoint/sharded_state.py engines/pipeline/state.py"
    ),
    "name a rank in an error": "engines/ddp/run.py",
    "meets strategies of others, which have no dimensions": "data/evaluation.py",
    "shards over the world": "engines/zero/construction.py",
    "gathers over the world": "engines/zero/backward_order.py",
}
"""Files outside of `distributed`, `comm`, `compat` and `cli` that ask for the world size or the rank, by reason."""


def layer_of(module: str) -> int:
    """Return the layer of a module, given by its dotted name below `lightning_paral`. The empty name is the package."""
    return LAYERS.index(module.split(".")[0] or "__init__")


def imports() -> Iterator[tuple[str, str]]:
    """Yield the dotted names below `lightning_paral` of each module and of a module that it imports."""
    for file, tree in trees().items():
        importer = file.removesuffix(".py").replace("/", ".")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                names = [node.module or ""]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("lightning_paral"):
                    yield importer, name.removeprefix("lightning_paral").lstrip(".")


def test_imports_go_down() -> None:
    upward = [f"{own} imports {imported}" for own, imported in imports() if layer_of(imported) < layer_of(own)]

    assert not upward, "\n".join(["modules import from layers above them:", *upward])


def test_engines_do_not_import_each_other() -> None:
    engines = [(own, imported) for own, imported in imports() if own.startswith("engines.")]
    between = [
        f"{own} imports {imported}"
        for own, imported in engines
        if imported.startswith("engines.") and imported.split(".")[1] != own.split(".")[1]
    ]

    assert not between, "\n".join(["engines import another engine:", *between])


def test_files_hold_one_idea_each() -> None:
    assert not [file for file in trees() if file.endswith(("utils.py", "helpers.py", "common.py"))]


def reads_the_world(file: str, tree: ast.Module) -> bool:
    """Return whether a file asks for the world size or the global rank of a run."""
    owners = {"trainer", "_trainer", "strategy", "_strategy"} | ({"self"} if file.startswith("strategies/") else set())
    nodes = list(ast.walk(tree))
    read = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr in ("world_size", "global_rank"))
    calls = (node for node in nodes if isinstance(node, ast.Call) and not (node.args or node.keywords))
    return any(ast.unparse(node.value).split(".")[-1] in owners for node in read) or any(
        isinstance(call.func, ast.Attribute) and call.func.attr in ("get_world_size", "get_rank") for call in calls
    )


def test_only_parallel_dims_decide_which_ranks_draw_samples_and_hold_replicas() -> None:
    rooms = ("distributed/", "comm/", "compat/", "cli/")

    reading = {file for file, tree in trees().items() if not file.startswith(rooms) and reads_the_world(file, tree)}

    assert reading == set(" ".join(MAY_READ_THE_WORLD.values()).split())
