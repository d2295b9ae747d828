"""Compile the DeepSpeed operators that tests need: `python -m tests.compile_operators`.

An operator that is already compiled is only loaded. Of two processes that need the same operator, one waits.
"""

import os

if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    from lightning_paral.engines.zero.runtime.operators import load_operator

    load_operator("cpu_adam", "the tests")
    load_operator("async_io", "the tests")
