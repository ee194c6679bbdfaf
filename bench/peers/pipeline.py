#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures training steps of PyTorch's pipeline parallelism on CPU ranks, by torch.distributed.pipelining.

Each rank is a process with so many torch threads, joined by gloo over loopback. The model is gpt with 8 blocks and a
head of its own, cut evenly by blocks: the embedding is in the first stage, the last norm and the head in the last. A
rank has one stage with 1f1b and gpipe, and two with interleaved and zbv. A step is the schedule over all micro-batches
of 256-token sequences, made once, then AdamW (fused) and zero_grad on each rank's own stages.

As in data.py, grads are set to None and glibc's malloc keeps what it has. Tried besides, on 2 cores beside other work,
so that a few percent cannot be told apart: dividing the loss by the micro-batches rather than the grads (scale_grads)
and returning no outputs, used although neither made a difference; torch.compile of the stages, which gave nothing and
is not used. With little else running, all schedules were within a tenth of 1f1b (0.95 to 1.08 s a step); with the
cores busy, interleaved and zbv took 0.8 of its time: 1f1b waits for most sends before it goes on, and they do not.

{"ready": true} on stdout after three steps, then it obeys lines on stdin: "run N" does N steps and prints the time
from a barrier to the end of the slowest rank; "quit", or the end of stdin, ends it. Between runs all ranks block.
With --check it prints the losses of the first three steps, and those of the model run whole in one process, instead.
Exit 1 if a rank fails, a loss is not finite, a deadline passes or the check fails, with the first cause on stderr; 2
for bad arguments.
"""
import argparse

import data_models as models  # first: it says what to do where there is no torch
import torch
from torch.distributed import pipelining

SIZES = dict(models.SIZES["gpt"], blocks=8)
SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe,
             "interleaved": pipelining.ScheduleInterleaved1F1B, "zbv": pipelining.ScheduleZBVZeroBubble}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--micro-batches", type=int, default=8, help="in a step")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences in each")
    parser.add_argument("--check", action="store_true", help="compare losses instead")
    for name in ("--rank", "--port", "--parent"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ranks, count = arguments.ranks, arguments.micro_batches
    if min(ranks, arguments.threads, count, arguments.micro_batch) < 1:
        parser.error("--ranks, --threads, --micro-batches and --micro-batch want 1 or more")
    arguments.single = arguments.schedule in ("1f1b", "gpipe")
    arguments.stages = ranks * (1 if arguments.single else 2)
    if SIZES["blocks"] % arguments.stages:
        parser.error(f"{SIZES['blocks']} blocks cannot be cut evenly into {arguments.stages} stages")
    if arguments.schedule == "1f1b" and count < ranks:
        parser.error("1f1b wants at least as many micro-batches as ranks")
    if arguments.schedule == "interleaved" and count % max(1, count // ranks):
        parser.error(f"interleaved cannot share {count} micro-batches between {ranks} ranks")
    return arguments


def make_stage(model, index, count):
    blocks = SIZES["blocks"] // count
    start = 1 + index * blocks if index > 0 else 0
    part = model[start:1 + (index + 1) * blocks] if index + 1 < count else model[start:]
    return pipelining.PipelineStage(part, index, count, torch.device("cpu"))


def make_step(arguments):
    """On a rank its part of the step; in the starting process all of it, without a schedule."""
    rank, count = arguments.rank, arguments.micro_batches
    torch.manual_seed(1)
    model = models.make_untied(SIZES)
    torch.manual_seed(100)
    inputs, targets = models.make_data("gpt", SIZES, count * arguments.micro_batch)

    def loss_of(outputs, targets):  # of one micro-batch, as its part of the mean
        return models.loss_of("gpt", outputs, targets) / count

    if rank is None:
        def run_schedule():
            losses = [loss_of(model(x), y) for x, y in zip(inputs.chunk(count), targets.chunk(count))]
            sum(losses).backward()
            return losses
    else:
        second = {"interleaved": [rank + arguments.ranks], "zbv": [arguments.stages - 1 - rank]}
        indices = [rank, *second.get(arguments.schedule, [])]
        stages = [make_stage(model, index, arguments.stages) for index in indices]
        schedule = SCHEDULES[arguments.schedule](stages[0] if arguments.single else stages, count, loss_fn=loss_of,
                                                 scale_grads=False)
        model = torch.nn.ModuleList([stage.submod for stage in stages])
        given = [inputs] if stages[0].is_first else []
        wanted = targets if stages[-1].is_last else None

        def run_schedule():
            losses = []
            schedule.step(*given, target=wanted, losses=losses, return_outputs=False)
            return losses

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        losses = run_schedule()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(loss.detach() for loss in losses) if losses else None

    return step


def main():
    arguments = parse_arguments()
    models.run_program("pipeline.py", arguments, lambda: make_step(arguments), peer="pipeline",
                       schedule=arguments.schedule)


if __name__ == "__main__":
    main()
