#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures rounds of four small models that work together, the way it is usually written: torch.distributed over gloo.

Each model is a process with one torch thread and computes Linear(64, 64), tanh, Linear(64, 64) on a batch of 8. chain:
each gets what the one before gives, by send and recv. ensemble: every rank has the input of the round already, and the
first takes the mean of what all_gather brings. ensemble-sent: the others send to the first instead. Weights and inputs
are sines, so that whoever compares knows the outputs: --expect names a file with them, float32, and those of every
round are held against it.

What made a round fastest on 2 cores, and is used: inference_mode; buffers made once; a window of 128 rounds whose
messages are under way while a model computes, by isend, irecv and async_op. Rounds/s by --window 1, 8, 32, 128 and 512,
beside other work: chain 800, 1,400, 3,700, 6,000 and 6,200; ensemble-sent 1,800, 2,700, 4,800, 5,900 and 6,400;
ensemble 240 with 1 and 375 with more. Plain send and recv made 940 of a chain.

{"ready": true} on stdout, then it obeys lines on stdin: "run N" does N rounds and prints the time from a barrier to
the end of the slowest rank; "quit", or the end of stdin, ends it. Exit 1 if a rank fails, an output is wrong or a
deadline passes, with the first cause on stderr; 2 for bad arguments.
"""
import argparse
import collections
import subprocess
import sys
import time

import data_models as models  # first: it says what to do where there is no torch
import torch
import torch.distributed as dist
from torch.nn import functional as F

RANKS, BATCH, DIM = 4, 8, 64
INPUTS = 4  # rounds take them in turn


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=RUNS, required=True)
    parser.add_argument("--expect", required=True, help="a file with the outputs that belong to the inputs")
    parser.add_argument("--window", type=int, default=128, help="rounds under way between two ranks")
    for name in ("--rank", "--port", "--parent"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.ranks = RANKS
    if arguments.window < 1:
        parser.error("--window wants 1 or more")
    return arguments


def sines(count, times, plus):
    return torch.sin(torch.arange(count, dtype=torch.float64) * times + plus)


def make_inputs():
    return [sines(BATCH * DIM, 1, k).float().view(BATCH, DIM) for k in range(INPUTS)]


def make_model(rank):
    first, second = ((sines(DIM * DIM, rank + 1, layer) / 8).float().view(DIM, DIM) for layer in range(2))
    bias = sines(DIM, 1, rank).float()
    return lambda x: F.linear(torch.tanh(F.linear(x, first, bias)), second, bias)


def run_chain(model, inputs, count, window):
    """The outputs of the rounds, in the last rank."""
    rank, outputs, sent, received = dist.get_rank(), [], collections.deque(), collections.deque()
    buffers = [torch.empty(BATCH, DIM) for _ in range(window)]
    if rank > 0:
        received.extend(dist.irecv(buffers[i], rank - 1) for i in range(min(window, count)))
    for i in range(count):
        x = inputs[i % INPUTS]
        if rank > 0:
            x = buffers[i % window]
            received.popleft().wait()
        y = model(x)
        if rank > 0 and i + window < count:
            received.append(dist.irecv(x, rank - 1))
        if rank + 1 == RANKS:
            outputs.append(y)
            continue
        sent.append((dist.isend(y, rank + 1), y))
        if len(sent) == window:
            sent.popleft()[0].wait()
    for work, _ in sent:
        work.wait()
    return outputs


def run_ensemble(model, inputs, count, window):
    """The outputs of the rounds, in the first rank."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name, if it is there
    outputs, gathered = [], collections.deque()
    buffers = [torch.empty(RANKS, BATCH, DIM) for _ in range(window)]

    def finish():
        work, all_of_them, _ = gathered.popleft()
        work.wait()
        if dist.get_rank() == 0:
            outputs.append(all_of_them.mean(0))

    for i in range(count):
        if len(gathered) == window:
            finish()
        y = model(inputs[i % INPUTS])
        gathered.append((gather(buffers[i % window].view(-1, DIM), y, async_op=True),
                         buffers[i % window], y))
    while gathered:
        finish()
    return outputs


def run_ensemble_sent(model, inputs, count, window):
    """The same with messages to the first rank alone."""
    rank, outputs, sent = dist.get_rank(), [], collections.deque()
    if rank > 0:
        for i in range(count):
            y = model(inputs[i % INPUTS])
            sent.append((dist.isend(y, 0), y))
            if len(sent) == window:
                sent.popleft()[0].wait()
        for work, _ in sent:
            work.wait()
        return outputs
    buffers = [torch.empty(RANKS, BATCH, DIM) for _ in range(window)]
    received = collections.deque()

    def receive(i):
        received.append([dist.irecv(buffers[i % window][other], other) for other in range(1, RANKS)])

    for i in range(min(window, count)):
        receive(i)
    for i in range(count):
        buffers[i % window][0] = model(inputs[i % INPUTS])
        for work in received.popleft():
            work.wait()
        outputs.append(buffers[i % window].mean(0))
        if i + window < count:
            receive(i + window)
    return outputs


RUNS = {"chain": run_chain, "ensemble": run_ensemble, "ensemble-sent": run_ensemble_sent}


def obey(arguments, answer):
    inputs, model = make_inputs(), make_model(arguments.rank)
    run = RUNS[arguments.what]
    wanted = torch.from_file(arguments.expect, size=INPUTS * BATCH * DIM).view(INPUTS, BATCH, DIM)
    run(model, inputs, 100, arguments.window)  # warm-up
    answer(seconds=0)
    for line in sys.stdin:  # blocks until the starting process writes, or is gone
        dist.barrier()
        start = time.perf_counter()
        outputs = run(model, inputs, int(line), arguments.window)
        seconds = time.perf_counter() - start
        for i, output in enumerate(outputs):
            if not torch.allclose(output, wanted[i % INPUTS], rtol=0, atol=1e-4):
                raise ArithmeticError(f"the output of round {i} is wrong")
        answer(seconds=seconds)


def main():
    arguments = parse_arguments()
    if arguments.rank is not None:
        with torch.inference_mode():
            models.be_rank(arguments, 1, True, lambda answer: obey(arguments, answer))
        return
    try:
        models.serve(RANKS, 1, peer="python", what=arguments.what)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"flow.py: {error}")


if __name__ == "__main__":
    main()
