"""Check that the options in snippets exist: compare keywords of calls with the signature of the class."""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import lightning.pytorch
from lightning.pytorch import callbacks, strategies
from torch.nn.parallel import DistributedDataParallel

import lightning_paral


def _known() -> dict[str, Any]:
    found = {name: vars(callbacks)[name] for name in callbacks.__all__}
    found |= {name: vars(strategies)[name] for name in strategies.__all__}
    found |= {name: getattr(lightning_paral, name) for name in lightning_paral.__all__}
    return {name: value for name, value in found.items() if isinstance(value, type)} | {
        "Trainer": lightning.pytorch.Trainer
    }


KNOWN = _known()
DDP_OPTIONS = set(inspect.signature(DistributedDataParallel).parameters)


def wrong_options(source: str) -> Iterator[str]:
    """Yield `Class(option)` for each keyword in `source` that the class does not have.

    Raises:
        SyntaxError: `source` is not Python.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).split(".")[-1]
        if name not in KNOWN:
            continue
        parameters = inspect.signature(KNOWN[name]).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        allowed = set(parameters) | (DDP_OPTIONS if takes_any else set())
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in allowed:
                yield f"{name}({keyword.arg})"


def inline_calls(text: str) -> Iterator[str]:
    """Yield the inline code of a page that is Python and ends with a call."""
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`\n]+\))`", without_blocks):
        try:
            ast.parse(code)
        except SyntaxError:
            continue
        yield code
