"""Kill, break or stop one rank of real training runs, and see how the runs end.

How to run, from the root of the repository:

    python -m tests.distributed.faults --jobs 2                 # all of them: up to an hour or two
    python -m tests.distributed.faults --only strategy=paral_fsdp,launcher=torchrun,stage=step
    python -m tests.distributed.faults --sample 40              # 40 varied ones

Each run is a training script (`failing.py`), started with plain Python or torchrun in processes of its own. One rank of
it writes the time to a file, then fails. The driver (`runs.py`) waits until every process of the run has ended, for 60
seconds at most, and reads what the run printed. A line says whether the cause was shown, at the end of the output, and
once; the seconds from the failure to the end of the last process; the processes that were left; and the exit statuses
that were wrong. `cases.py` lists the faults.

Runs over two nodes use network namespaces and are left out without the permission to create them. Seconds depend on how
busy the machine is: use at most one job for each two cores. The exit status is 1 if a run did not end as it should.
"""
