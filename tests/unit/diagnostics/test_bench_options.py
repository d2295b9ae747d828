"""Options of `paral bench` that cannot work end with one clear error, before anything runs."""

import re

import pytest

from tests.command import run_paral

FREE = r"needs about .* of host memory, but .* are free"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("comm --algorithms rign", r"--algorithms: there is no 'rign'. Did you mean 'ring'\?"),
        ("comm --algorithms ,", "--algorithms names nothing"),
        ("comm --sizes ,", "--sizes names nothing"),
        ("comm --wire int8", "--wire: there is no 'int8'. The names are fp32, bf16, fp16."),
        ("comm --sizes 1MiB,huge", "--sizes 'huge' is not a size. Give a size such as"),
        ("comm --sizes 4", "a tensor of 2 ranks needs an fp32 element for each, which are 8 bytes"),
        ("comm --ranks 1", "--ranks 1: collectives need at least 2 ranks."),
        ("comm --ranks 100000", FREE),
        ("comm --rounds 0", "--rounds 0 is not a number of rounds"),
        ("comm --timeout 0", "--timeout 0.0 is not a number of minutes"),
        ("comm --plot bench.txt", "--plot 'bench.txt': the ending names no format. Use one of .*png"),
        ("comm --plot missing/bench.png", "--plot 'missing/bench.png': there is no folder 'missing'"),
        ("adam --sizes 1X", "--sizes '1X' is not a size"),
        ("adam --sizes 100T", FREE),
        ("adam --threads 0", "--threads 0 is not a number of threads"),
        ("adam --threads two", "--threads 'two' is not a whole number"),
        ("adam --optimizers loops", r"there is no 'loops'. Did you mean 'loop'\?"),
        ("step --strategies pral_fsdp", "there is no 'pral_fsdp'. Did you mean 'paral_fsdp'"),
        ("step --strategies ddp,ddp", "--strategies names 'ddp' twice"),
        ("step --strategies paral_dp", "paral_dp runs all devices in one process"),
        ("step --ranks 0", "--ranks 0 is not a number of ranks"),
        ("step --ranks 100000", FREE),
        ("step --steps 0", "--steps 0 is not a number of steps"),
        ("step --config missing.yaml", "--config missing.yaml cannot be read as YAML"),
        ("memory --strategies paral_zero33", r"--strategies: there is no 'paral_zero33'. Did you mean 'paral_zero3'"),
        ("memory --strategies paral_dp", r"--strategies: there is no 'paral_dp'. Did you mean 'paral_ddp'"),
        ("memory --strategies ddp,ddp", "--strategies names 'ddp' twice"),
        ("memory --ranks 0", "--ranks 0 is not a number of ranks. Give at least 1."),
        ("memory --ranks 2,0", "--ranks 0 is not a number of ranks"),
        ("memory --ranks 2,2", "--ranks names 2 twice"),
        ("memory --ranks -2", "--ranks '-2' is not a whole number"),
        ("memory --ranks 1,100000", FREE),
        ("memory --config missing.yaml", "--config missing.yaml cannot be read as YAML"),
        ("memory --widht 8", "There is no option '--widht'. .* such as --model.width 1024"),
        ("memory --ranks 1 2", "'2' belongs to no option. Lists have commas"),
        ("checkpoint --strategies raw_ddp", "'raw_ddp' is a hand-written loop, which has no checkpoints"),
        ("checkpoint --folder missing", "--folder missing is not a folder in which files can be created"),
    ],
)
def test_option_that_cannot_work(arguments: str, message: str) -> None:
    said = run_paral("bench", *arguments.split())
    assert re.match(rf"paral: (?s:.*)({message})", said)
    assert "Traceback" not in said
