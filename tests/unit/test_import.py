import subprocess
import sys

REPORT = """
import sys
import lightning.pytorch  # imports transformers if it is installed
import torch
before = set(sys.modules)
import lightning_paral
heavy = ("deepspeed", "matplotlib", "jsonargparse", "tabulate", "transformers")
print([name for name in heavy if name in set(sys.modules) - before])
print(torch.cuda.is_initialized())
"""


def test_import_is_light_and_makes_no_cuda_context() -> None:
    printed = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, check=True, timeout=300)

    assert printed.stdout.splitlines() == ["[]", "False"]
