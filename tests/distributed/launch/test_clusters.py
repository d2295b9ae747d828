"""Each strategy joins the ranks that a cluster started; missing or wrong variables are one error before training.

The schedulers are simulated by the environment variables that they set.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import KubeflowEnvironment
from lightning.pytorch import Trainer

from lightning_paral import ConfigurationError
from tests.contract.cases import PER_ENGINE, labels, strategy_of, with_ranks
from tests.launching import TORCHRUN, Process, free_port, outputs
from tests.network import joined_nodes, why_no_nodes
from tests.running import quiet_trainer

VARIABLES = ("SLURM_", "JSM_", "LSB_", "OMPI_", "PMI_", "TORCHELASTIC_", "GROUP_", "LOCAL_", "MASTER_", "NODE_")
SCRIPT = ("-m", "tests.distributed.launch.launched", "cluster")


class OwnEnvironment(ClusterEnvironment):
    """A user's own cluster: ranks are in OWN_RANK."""

    creates_processes_externally = True
    main_address = "127.0.0.1"

    @property
    def main_port(self) -> int:
        return int(os.environ["OWN_PORT"])

    @staticmethod
    def detect() -> bool:
        return "OWN_RANK" in os.environ

    def world_size(self) -> int:
        return int(os.environ["OWN_SIZE"])

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return int(os.environ["OWN_RANK"])

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self.global_rank()

    def node_rank(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(VARIABLES) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("cluster", "label", "common", "rank", "port"),
    [
        ("kubeflow", "paral_fsdp", {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}, "RANK", "MASTER_PORT"),
        ("own", "paral_zero3", {"OWN_SIZE": "2"}, "OWN_RANK", "OWN_PORT"),
    ],
)
def test_ranks_that_a_cluster_started_join(launch, tmp_path: Path, cluster, label, common, rank, port) -> None:
    common = common | {port: str(free_port())}
    started = [launch(*SCRIPT, str(tmp_path), cluster, label, **common, **{rank: number}) for number in "01"]

    assert outputs_of_both_ranks(tmp_path, started).count(f"{label}: 2 ranks") == 1


def outputs_of_both_ranks(folder: Path, processes: list[Process]) -> str:
    """Assert that two ranks have trained together, and return what they print."""
    printed = "\n".join(outputs(*processes))
    assert [process.returncode for process in processes] == [0, 0], printed
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(report["rank"], report["world_size"], report["sum_after"]) for report in reports] == [
        (0, 2, 2.0),
        (1, 2, 2.0),
    ]
    assert reports[0]["weight"] == reports[1]["weight"]
    return printed


def test_torchrun_on_two_nodes(launch, tmp_path: Path) -> None:
    reason = why_no_nodes()
    if reason:
        pytest.skip(reason)
    with joined_nodes(2) as nodes:
        launcher = [*TORCHRUN[:3], "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", f"{nodes.addresses[0]}:29577"]
        processes = [
            launch(
                *["--local-addr", nodes.addresses[node]],
                # torchrun cannot tell: the nodes have the same host name.
                *["--rdzv-conf", f"is_host={int(node == 0)}"],
                *(*SCRIPT, str(tmp_path), "torchrun_on_two_nodes", "paral_fsdp"),
                by=nodes.command_on(node, launcher),
                GLOO_SOCKET_IFNAME="eth0",
            )
            for node in (0, 1)
        ]
        printed = outputs_of_both_ranks(tmp_path, processes)

    assert "paral_fsdp: 2 ranks (2 shards) on 2 nodes" in printed


KUBEFLOW = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}
MISTAKES: list[tuple[Any, dict[str, str], str]] = [
    (KubeflowEnvironment, KUBEFLOW | {"WORLD_SIZE": "3"}, r"has 3 processes, but Trainer\(devices=1, num_nodes=1"),
    (None, {"OMPI_COMM_WORLD_SIZE": "2"}, r"A launcher started 2 processes.*mpi4py"),
    (None, {"PMI_SIZE": "4"}, r"A launcher started 4 processes \(PMI_SIZE=4\)"),
    (None, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NAME": "bash"}, r"A launcher started 2.*SLURM_JOB_NAME"),
    (None, KUBEFLOW, r"A launcher started 2 processes \(WORLD_SIZE=2\).*KubeflowEnvironment"),
]


@pytest.mark.parametrize(("environment", "variables", "message"), MISTAKES)
@pytest.mark.parametrize("label", labels(with_ranks(PER_ENGINE, 2)))
def test_mistake_in_the_variables_of_a_cluster_is_one_error(
    label: str, environment: Any, variables: dict[str, str], message: str, monkeypatch: Any
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plugins = [] if environment is None else [environment()]

    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(strategy=strategy_of(label), plugins=plugins, devices=1)


def test_interactive_job_of_slurm_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    trainer: Trainer = quiet_trainer(strategy="paral_ddp", devices=2)

    assert trainer.world_size == 2
    assert not trainer.strategy.cluster_environment.creates_processes_externally
