"""Download the wheels that a GPU machine without network access lacks: `python -m tests.gpu.carry FOLDER`.

Writes the wheels, and a script that installs them to a separate folder, `sh FOLDER/install.sh SITE`. The machine must
have torch, Lightning, their dependencies and pytest. The wheels are for Python 3.12 on Linux.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PYTHON = "3.12"
DEEPSPEED = "deepspeed==0.19.8"
"""Source distributions, built to wheels here without operators, which are compiled at first use."""
WITH_DEPENDENCIES = ("pydantic", "jsonargparse[signatures]")
WITHOUT = ("hjson", "einops", "msgpack", "ninja", "psutil", "py-cpuinfo", "nvidia-ml-py", "tabulate", "xxhash")
"""Dependencies of DeepSpeed and of this package; all others are torch, or come with it."""
_INSTALL = """#!/bin/sh
# Installs the wheels beside this script to a folder: sh install.sh SITE; then PYTHONPATH=SITE:$PWD python ...
set -e
python -m pip install --quiet --no-index --no-deps --target "$1" "$(dirname "$0")"/*.whl
echo "export PYTHONPATH=$1:\\$PWD"
"""


def download(folder: Path) -> list[Path]:
    """Download the wheels to `folder`; return their paths.

    Raises:
        subprocess.CalledProcessError: pip failed; its output is above.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    there = ["--python-version", PYTHON, "--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64"]
    download = [*pip, "download", "--quiet", "--only-binary=:all:", *there, "-d", str(folder)]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    for command in ([*download, *WITH_DEPENDENCIES], [*download, "--no-deps", *WITHOUT], [*build, DEEPSPEED]):
        subprocess.run(command, check=True, timeout=600)
    (folder / "install.sh").write_text(_INSTALL)
    return sorted(folder.glob("*.whl"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Download the wheels, and print what to do on the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="such as gpu-wheels, which git ignores: wheels are not committed")
    folder: Path = parser.parse_args(arguments).folder
    wheels = download(folder)
    total = sum(wheel.stat().st_size for wheel in wheels)
    print("\n".join(wheel.name for wheel in wheels))
    print(
        f"\n{len(wheels)} wheels, {total / 1e6:.1f} MB. Carry {folder} to the machine, and there, in the repository:\n"
    )
    print(f"  sh {folder}/install.sh gpu-site && export PYTHONPATH=$PWD/gpu-site:$PWD OMP_NUM_THREADS=4")
    for program in ("tests.gpu.all", "tests.gpu.two_on_one"):
        print(f"  python -m {program}")
    print("  torchrun --nproc-per-node 1 -m tests.benchmarks.steps --device cuda --size 124M")
    return 0


if __name__ == "__main__":
    sys.exit(main())
