"""`import lightning_paral` loads the registry and the options; the rest is imported when it is used."""

import subprocess
import sys

import lightning_paral

MODULES = """
import sys
import lightning.pytorch  # imports transformers if it is installed
import torch
before = set(sys.modules)
import lightning_paral
heavy = ("deepspeed", "matplotlib", "jsonargparse", "pydantic", "tabulate", "transformers")
print([name for name in heavy if name in set(sys.modules) - before])
print(torch.cuda.is_initialized())
print(len([name for name in sys.modules if name.startswith("lightning_paral")]))
print("lightning_paral.strategies" in sys.modules)
"""


def test_import_is_light_and_makes_no_cuda_context() -> None:
    printed = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, check=True, timeout=300)

    *facts, num_modules, has_strategies = printed.stdout.splitlines()
    assert facts == ["[]", "False"]
    assert int(num_modules) <= 40
    assert has_strategies == "False"


def test_every_public_name_can_be_imported() -> None:
    assert set(lightning_paral.__all__) <= set(dir(lightning_paral))
    for name in lightning_paral.__all__:
        assert getattr(lightning_paral, name) is not None
    assert not hasattr(lightning_paral, "no_such_name")
