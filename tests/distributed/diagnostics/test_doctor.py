"""`paral doctor` on real ranks."""

import json
import os
import re
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from lightning_paral.diagnostics import doctor
from tests.launching import outputs


def printed_by_doctor(launch: Any) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    process = launch("-m", "lightning_paral", "doctor", "--ranks", "2", "--json")
    (printed,) = outputs(process)
    report, _ = json.JSONDecoder().raw_decode(printed, printed.index("{"))
    return process.returncode, report, {fact["name"]: fact for fact in report["facts"]}


def test_ranks_answer_and_nothing_is_broken(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARAL_NVME_PATH", raising=False)

    status, report, facts = printed_by_doctor(launch)

    assert (status, report["broken"]) == (0, []), report
    assert re.fullmatch(r"2 ranks, gloo on CPU: .*s for 4.00 MiB", facts["all-reduce"]["found"])


def test_an_interface_that_does_not_exist_is_broken(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")

    status, report, facts = printed_by_doctor(launch)

    assert (status, report["broken"]) == (1, ["all-reduce"])
    assert facts["all-reduce"]["found"].endswith("Unable to find address for: nowhere")
    assert "choose a network interface" in facts["all-reduce"]["advice"]
    assert [entry["name"] for entry in report["strategies"] if not entry["lacks"]] == ["paral_dp"]


def hang(is_cuda: bool) -> None:
    time.sleep(100 * dist.get_rank())


def die(is_cuda: bool) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("instead", "said"),
    [(hang, r"rank 1: no answer in time, in `hang` \(test_doctor.py:\d+\)"), (die, "rank 1: the process died")],
)
def test_a_rank_that_hangs_or_dies_is_a_line(
    on_ranks, monkeypatch: pytest.MonkeyPatch, instead: Any, said: str
) -> None:
    on_ranks(1, os.getpid)  # the fork server of the tests starts with their modules
    monkeypatch.setattr(doctor, "_all_reduce", instead)

    fact = doctor.all_reduce_fact(2, seconds=3.0)

    assert (fact.name, fact.state, fact.stops) == ("all-reduce", "broken", doctor.RANKS)
    assert re.fullmatch(f"2 ranks, gloo on CPU: {said}", fact.found)
