"""A rank under torchrun is killed; the restarted run ends like an undisturbed one."""

import random
from pathlib import Path

from tests.distributed.elastic.job import Job, assert_same_run, run_undisturbed


def test_restarted_run_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = run_undisturbed(tmp_path / "undisturbed", 60)
    job = Job(tmp_path / "job", "ddp", 60, 0.05)
    try:
        job.start_agent("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
        job.wait_for_progress(2, seconds=120)
        job.kill_one_rank(random.Random(0))
        job.finish(seconds=180)
    finally:
        job.end()

    assert_same_run(job, undisturbed)
    assert "AutoResume: resuming from " in job.output()
