"""Measure the import time that this package adds to Lightning's: python -m tests.benchmarks.import_time"""

import statistics
import subprocess
import sys

MEASURE = """
import time
import lightning.pytorch
start = time.perf_counter()
import lightning_paral
print(time.perf_counter() - start)
"""

if __name__ == "__main__":
    command = [sys.executable, "-c", MEASURE]
    seconds = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(9)]
    print(f"import lightning_paral: {statistics.median(seconds) * 1e3:.0f} ms (median of {len(seconds)})")
