"""A training script under a cluster: `joined.py CLUSTER STRATEGY RESULT_FOLDER`. Each rank writes what it saw."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import KubeflowEnvironment

import lightning_paral  # noqa: F401  registers the names
from tests.distributed.launch.test_clusters import OwnEnvironment
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

ENVIRONMENTS = {"kubeflow": KubeflowEnvironment, "own": OwnEnvironment}
ONE_DEVICE_PER_NODE = ("kubeflow", "torchrun_on_two_nodes")

if __name__ == "__main__":
    cluster, strategy, folder = sys.argv[1:]
    plugins = [ENVIRONMENTS[cluster]()] if cluster in ENVIRONMENTS else []
    devices, num_nodes = (1, 2) if cluster in ONE_DEVICE_PER_NODE else (2, 1)
    trainer = quiet_trainer(strategy=strategy, devices=devices, num_nodes=num_nodes, plugins=plugins, max_epochs=1)
    model = Regression()
    trainer.fit(model, regression_data(4, 2))
    ones = torch.ones(())
    dist.all_reduce(ones)
    report = {"rank": trainer.global_rank, "world_size": trainer.world_size, "sum": ones.item()}
    report["weight"] = model.out.weight.sum().item()
    (Path(folder) / f"rank-{trainer.global_rank}.json").write_text(json.dumps(report))
