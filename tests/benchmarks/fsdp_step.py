"""A training step of the example's GPT by name against the same step in a hand-written `fully_shard` loop.

    torchrun --nproc-per-node 2 -m tests.benchmarks.fsdp_step

Blocks of steps of both kinds alternate in the same processes; a step lasts from the end of one to the end of the next.
`--device cuda` runs the same on GPUs and gives tokens per second as well.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.data import DataLoader, DistributedSampler

import lightning_paral  # noqa: F401  registers the names
from examples.gpt import GPT, StandardLibrary
from lightning_paral.engines.fsdp.gloo import DirectReduceScatter
from tests.benchmarks.ddp_step import StepTimes, differences
from tests.running import quiet_trainer

BATCH_SIZE, CONTEXT = 32, 128


def steps_by_name(dataset: StandardLibrary, num_steps: int, device: torch.device) -> list[float]:
    times = StepTimes()
    trainer = quiet_trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        strategy="paral_fsdp",
        devices=dist.get_world_size(),
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[times],
    )
    trainer.fit(GPT(), DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True))
    return differences(times.ends)


def steps_by_hand(dataset: StandardLibrary, num_steps: int, device: torch.device, direct: bool) -> list[float]:
    model = GPT()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (*model.blocks, model) if direct else ():
        module.set_custom_reduce_scatter(DirectReduceScatter())
    register_fsdp_forward_method(model, "loss")
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset), drop_last=True)

    ends = []
    for number, batch in enumerate(loader):
        if number == num_steps:
            break
        optimizer.zero_grad()
        model.loss([part.to(device) for part in batch]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ends.append(time.perf_counter())
    return differences(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--direct", action="store_true", help="by hand with our reduce-scatter for gloo, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device, int(os.environ["LOCAL_RANK"]) if arguments.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    dataset = StandardLibrary("train", CONTEXT)
    by_name, by_hand = [], []
    for _ in range(arguments.blocks):
        by_name += steps_by_name(dataset, arguments.steps, device)
        by_hand += steps_by_hand(dataset, arguments.steps, device, arguments.direct)
    if dist.get_rank() == 0:
        named, written = statistics.median(by_name), statistics.median(by_hand)
        num_tokens = BATCH_SIZE * CONTEXT * dist.get_world_size()
        print(
            f"{named * 1e3:.1f} ms by name, {written * 1e3:.1f} ms by hand, ratio {named / written:.3f}, "
            f"{num_tokens / named:,.0f} tokens per second "
            f"(medians of {len(by_name)} steps each, {dist.get_world_size()} ranks)"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
