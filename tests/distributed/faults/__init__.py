"""Kill, break or stop one rank of real training runs, and see how the runs end.

Each run is a training script (`failing.py`), started with plain Python or torchrun in processes of its own. One rank of
it writes the time to a file, then fails. `runs.py` waits until every process of the run has ended, for 60 seconds at
most, and reads what the run printed. `cases.py` lists the runs.
"""
