"""A training step of the example's GPT by name against the same step in a hand-written DeepSpeed loop.

    torchrun --nproc-per-node 2 -m tests.benchmarks.zero_step --stage 2

Blocks of steps of both kinds alternate in the same processes; a step lasts from the end of one to the end of the next.
Both run DeepSpeed with the same configuration and collectives.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from examples.gpt import GPT, StandardLibrary
from lightning_paral import ParalZeROStrategy
from lightning_paral.engines.zero.parameters.snapshot import ModuleSnapshot
from lightning_paral.engines.zero.runtime import config as settings
from lightning_paral.engines.zero.runtime import deepspeed as runtime
from tests.benchmarks.ddp_step import Loss, StepTimes, differences
from tests.running import quiet_trainer

BATCH_SIZE, CONTEXT = 32, 128


def steps_by_name(stage: int, dataset: StandardLibrary, num_steps: int) -> list[float]:
    times = StepTimes()
    trainer = quiet_trainer(
        strategy=ParalZeROStrategy(stage=stage),
        devices=dist.get_world_size(),
        max_steps=num_steps,
        gradient_clip_val=1.0,
        callbacks=[times],
    )
    trainer.fit(GPT(), DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True))
    return differences(times.ends)


def steps_by_hand(stage: int, dataset: StandardLibrary, num_steps: int) -> list[float]:
    runtime.join_deepspeed(level=40, device=torch.device("cpu"))
    import deepspeed

    model = GPT()
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset), drop_last=True)

    wrapped = Loss(model)
    snapshot = ModuleSnapshot(wrapped)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    config = settings.complete({"zero_optimization": {"stage": stage}}, {})
    config |= {
        "zero_optimization": settings.add_device_defaults(
            config["zero_optimization"], stage, num_elements, device_type="cpu", num_ranks=dist.get_world_size()
        ),
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=wrapped, optimizer=optimizer, config=config, dist_init_required=False)
    ends = []
    for number, batch in enumerate(loader):
        if number == num_steps:
            break
        engine.backward(engine(batch))
        engine.step()
        scheduler.step()
        ends.append(time.perf_counter())
    snapshot.restore(gather=True)
    engine.destroy()
    runtime.leave_deepspeed()
    return differences(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = StandardLibrary("train", CONTEXT)
    by_name, by_hand = [], []
    for _ in range(arguments.blocks):
        by_name += steps_by_name(arguments.stage, dataset, arguments.steps)
        by_hand += steps_by_hand(arguments.stage, dataset, arguments.steps)
    if dist.get_rank() == 0:
        named, written = statistics.median(by_name), statistics.median(by_hand)
        print(
            f"stage {arguments.stage}: {named * 1e3:.1f} ms by name, {written * 1e3:.1f} ms by hand, "
            f"ratio {named / written:.3f} (medians of {len(by_name)} steps each, {dist.get_world_size()} ranks)"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
