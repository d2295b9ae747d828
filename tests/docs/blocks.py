"""The code blocks of the pages, and how each is run."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
HAND_WRITTEN = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.name not in ("lightning.md", "user-code.md") and path.parent.name != "reference"
)
_FENCE = re.compile(
    r'(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```',
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    language: str
    text: str
    title: str | None
    """The file that readers save it as."""
    reason: str | None
    """Why the tests do not run it; `None` if they do."""

    @property
    def lines(self) -> list[str]:
        """The commands of a bash block, without comments."""
        lines = (line.split("  #")[0].strip() for line in self.text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks_of(path: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    page = path.relative_to(DOCS).as_posix()
    return [
        Block(page, found["language"], found["text"], found["title"], found["reason"])
        for found in _FENCE.finditer(path.read_text())
    ]


@dataclass(frozen=True)
class Command:
    """A command line of a bash block."""

    program: str
    arguments: list[str]
    variables: dict[str, str]
    output: str | None = None
    """The file to which `> FILE` at the end of the line redirects the output."""

    @property
    def is_training(self) -> bool:
        """Whether it runs `paral` with a command of the Trainer."""
        return self.program == "paral" and self.arguments[0] in ("fit", "validate", "test", "predict")


def command_of(line: str) -> Command:
    """Return the command of a line, without its launcher: the ranks of the tests are already running."""
    words, variables = shlex.split(line), {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words[0] == "srun":
        words.pop(0)
    if words[0] == "torchrun":
        while words[1].startswith("--"):
            words[1:3] = [] if "=" not in words[1] else words[2:3]
        words = ["python", *words[1:]]
    if words[:3] == ["python", "-m", "lightning_paral"]:
        words = ["paral", *words[3:]]
    output = words[-1] if words[-2:-1] == [">"] else None
    return Command(words[0], words[1 : -2 if output else None], variables, output)


def filled(path: Path, blocks: dict[str, str]) -> str:
    """Return a page with new text between `<!-- begin: NAME -->` and `<!-- end: NAME -->`, for some of its names."""
    text = path.read_text()
    for name, block in blocks.items():
        pattern = rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)"
        shown = f"\n{block}\n\n"
        text, count = re.subn(pattern, lambda match, shown=shown: match[1] + shown + match[2], text, flags=re.DOTALL)  # type: ignore[misc]
        assert count == 1, f"{path.name}: no block {name}"
    return text
