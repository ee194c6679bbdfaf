#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures training steps of PyTorch's data parallelism on CPU ranks: DDP, FSDP2, or one process alone or compiled.

Each rank is a process with so many torch threads, joined by gloo over loopback. A step is forward, backward,
AdamW (fused) and zero_grad on a batch made once: of gpt 4 x 256 tokens for each rank, of mlp 4 samples. "alone" is
the same work as one rank's, in one process without any wrapper, whatever --ranks says.

What made a step fastest on 2 cores, and is used: grads set to None rather than to zero; glibc's malloc told to keep
what it has (for mlp alone, half the time of a step); gradients as views of DDP's buckets; for FSDP2, gathering the
next layer's weights while one computes. DDP's static_graph and buckets from 1 to 100 MiB instead of 25 made
no difference beyond the noise, nor did huge pages; DDP keeps its defaults there. FSDP2 is fastest when it keeps the
weights between forward and backward (--reshard no, as ZeRO 2); by default it does not (ZeRO 3).

On a GPU (--device cuda:0) there are alone and compile; gpt2 computes there in bfloat16 under autocast, with parameters
in float32, and 1024 tokens a sample. What is compiled is the model and its loss together, which is fastest. The loss is
not waited for, and a run begins with a step that does not count: memory that others have used meanwhile comes back.

After some 700 steps mlp has learnt its one batch, and AdamW's averages turn denormal: measure before that.

{"ready": true} on stdout after three steps, then it obeys lines on stdin: "run N" does N steps and prints the time
from a barrier to the end of the slowest rank; "quit", or the end of stdin, ends it. Between runs all ranks block.
Exit 1 if a rank fails, a loss is not finite or a deadline passes, with the first cause on stderr; 2 for bad arguments.
"""
import argparse
import subprocess
import sys


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("ddp", "fsdp2", "alone", "compile"), required=True)
    parser.add_argument("--model", choices=("gpt", "mlp", "gpt2"), required=True)
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda:0 for alone and compile")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, help="samples of a rank; 4, and of gpt2 16")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--loop", action="store_true",
                        help="what a training loop does besides: a new batch, the norm clipped to 1, the loss looked at")
    parser.add_argument("--reshard", choices=("yes", "no"), default="yes", help="fsdp2: free weights after forward")
    for name in ("--rank", "--port", "--parent"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks < 1 or arguments.threads < 1:
        parser.error("--ranks and --threads want 1 or more")
    arguments.batch = arguments.batch or (16 if arguments.model == "gpt2" else 4)
    arguments.together = arguments.peer in ("ddp", "fsdp2")
    if not arguments.together:
        arguments.ranks = 1
    elif arguments.device != "cpu":
        parser.error("ddp and fsdp2 are measured on the CPU")
    return arguments


def make_step(torch, models, arguments):
    name, sizes = arguments.model, models.SIZES[arguments.model]
    torch.manual_seed(1)
    model = models.make_model(name, sizes).to(arguments.device)
    torch.manual_seed(100 + arguments.rank)
    inputs, targets = (x.to(arguments.device) for x in models.make_data(name, sizes, arguments.batch))
    if arguments.peer == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if arguments.peer == "fsdp2":
        models.shard(model, arguments.reshard == "yes")
        model._set_unshard_async_op(True)  # so that a gather can overlap with computing
        for layer, following in zip(model.layers, list(model.layers)[1:]):
            layer.set_modules_to_forward_prefetch([following])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if arguments.loop:
        for block in model.modules():
            if isinstance(block, models.Block):
                block.gelu = "tanh"  # as GPT-2

    def loss_of(inputs, targets):
        with torch.autocast(arguments.device.split(":")[0], torch.bfloat16, enabled=name == "gpt2"):
            return models.loss_of(name, model(inputs), targets)

    if arguments.peer == "compile":
        loss_of = torch.compile(loss_of)

    def step():
        nonlocal inputs, targets
        if arguments.loop:
            inputs, targets = models.make_data(name, sizes, arguments.batch)
            if arguments.device != "cpu":  # from pinned memory, so that the host does not wait
                inputs, targets = (x.pin_memory().to(arguments.device, non_blocking=True) for x in (inputs, targets))
        loss = loss_of(inputs, targets)
        loss.backward()
        if arguments.loop:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if arguments.loop and arguments.device == "cpu":
            loss.item()  # a GPU would wait for it: there it is looked at after the last step
        return loss

    return step


def run_rank(torch, models, arguments, answer):
    synchronize = torch.cuda.synchronize if arguments.device != "cpu" else lambda: None
    release = torch.cuda.empty_cache if arguments.device != "cpu" else None
    models.obey(make_step(torch, models, arguments), answer, arguments.together, synchronize, release)


def main():
    arguments = parse_arguments()
    try:
        import torch
    except ImportError:
        sys.exit("data.py: this python3 has no torch; run it with the one of ./dev setup (.deps/python/bin/python)")
    import data_models as models
    if arguments.rank is not None:
        models.be_rank(arguments, arguments.threads, arguments.together,
                       lambda answer: run_rank(torch, models, arguments, answer))
        return
    try:
        models.serve(arguments.ranks, arguments.threads, peer=arguments.peer, model=arguments.model)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"data.py: {error}")


if __name__ == "__main__":
    main()
