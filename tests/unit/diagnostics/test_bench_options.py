"""Options of `paral bench` that cannot work end with one clear error, before anything runs."""

import re

import pytest

from tests.command import run_paral

FREE = r"needs about .* of host memory, but .* are free"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("comm --algorithms rign", r"--algorithms: there is no 'rign'. Did you mean 'ring'\?"),
        ("comm --sizes 1MiB,huge", "--sizes 'huge' is not a size. Give a size such as"),
        ("comm --ranks 1", "--ranks 1: collectives need at least 2 ranks."),
        ("comm --ranks 100000", FREE),
        ("comm --plot missing/bench.png", "--plot 'missing/bench.png': there is no folder 'missing'"),
        ("adam --threads two", "--threads 'two' is not a whole number"),
        ("step --strategies pral_fsdp", "there is no 'pral_fsdp'. Did you mean 'paral_fsdp'"),
        ("step --strategies paral_dp", "paral_dp runs all devices in one process"),
        ("step --config missing.yaml", "--config missing.yaml cannot be read as YAML"),
        ("memory --ranks 2,0", "--ranks 0 is not a number of ranks"),
        ("memory --widht 8", "There is no option '--widht'. .* such as --model.width 1024"),
        ("checkpoint --strategies raw_ddp", "'raw_ddp' is a hand-written loop, which has no checkpoints"),
    ],
)
def test_option_that_cannot_work(arguments: str, message: str) -> None:
    said = run_paral("bench", *arguments.split())
    assert re.match(rf"paral: (?s:.*)({message})", said)
    assert "Traceback" not in said
