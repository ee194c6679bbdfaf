#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures training steps of PyTorch's tensor parallelism on CPU ranks, by parallelize_module and DTensor.

Each rank is a process with so many torch threads, joined by gloo over loopback. The model is gpt with 4 blocks and a
head of its own: qkv (head by head, so that a rank has whole heads) and up are cut column-wise, out and down row-wise,
and the rest is replicated. A step is forward, backward, AdamW (fused) and zero_grad on a batch of 4 x 256 tokens, made
once and the same on all ranks.

With --sequence-parallel yes a rank holds only its part of the tokens between the cut layers, and for the embedding, the
norms and the head: whole sequences, so that what is gathered and scattered is contiguous.

As in data.py, grads are set to None and glibc's malloc keeps what it has. Tried besides, on 2 cores beside other work,
so that a few percent cannot be told apart: sequence parallelism, slower and so not the default, at 1.1 times the
processor time with one all_reduce for the gradients of what is replicated, as here, and 1.25 times with PyTorch's
SequenceParallel norms, along either dimension; a head cut by vocabulary with loss_parallel, which made no difference;
AdamW on local tensors instead of DTensors, which saves 3 % of the processor time; the last two are not used.
torch.compile of the blocks saves 15 %: --compile yes.

{"ready": true} on stdout after three steps, then it obeys lines on stdin: "run N" does N steps and prints the time
from a barrier to the end of the slowest rank; "quit", or the end of stdin, ends it. Between runs all ranks block.
With --check it prints the losses of the first three steps, and those of the model run whole in one process, instead.
Exit 1 if a rank fails, a loss is not finite, a deadline passes or the check fails, with the first cause on stderr; 2
for bad arguments.
"""
import argparse

import data_models as models  # first: it says what to do where there is no torch
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

SIZES, BATCH = models.SIZES["gpt"], 4


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--sequence-parallel", choices=("yes", "no"), default="no")
    parser.add_argument("--compile", choices=("yes", "no"), default="no", help="the blocks, by torch.compile")
    parser.add_argument("--check", action="store_true", help="compare losses instead")
    for name in ("--rank", "--port", "--parent"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks < 1 or arguments.threads < 1:
        parser.error("--ranks and --threads want 1 or more")
    if SIZES["heads"] % arguments.ranks or BATCH % arguments.ranks:
        parser.error(f"{SIZES['heads']} heads and {BATCH} sequences cannot be shared by {arguments.ranks} ranks")
    return arguments


class Block(models.Block):
    """Has q, k and v of one head next to each other, and as many heads as qkv gives it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, self.qkv.in_features // self.heads))
        q, k, v = qkv.transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def all_reduce_gradients(parameters):
    gradients = [parameter.grad for parameter in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


def make_step(arguments):
    """On a rank its part of the step; in the starting process all of it, on the model as it is."""
    torch.manual_seed(1)
    model = models.make_untied(SIZES, Block)
    torch.manual_seed(100)
    inputs, targets = models.make_data("gpt", SIZES, BATCH)
    parts = arguments.ranks if arguments.rank is not None and arguments.sequence_parallel == "yes" else 1
    if parts > 1:
        inputs, targets = inputs.chunk(parts)[arguments.rank], targets.chunk(parts)[arguments.rank]
    if arguments.rank is not None:
        mesh = dist.init_device_mesh("cpu", (arguments.ranks,))
        between = Shard(0) if parts > 1 else Replicate()
        for block in model[1:-2]:
            parallelize_module(block, mesh, {
                "qkv": ColwiseParallel(input_layouts=between), "out": RowwiseParallel(output_layouts=between),
                "up": ColwiseParallel(input_layouts=between), "down": RowwiseParallel(output_layouts=between)})
            if arguments.compile == "yes":
                block.compile()
    cut = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    others = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    # AdamW does not take both kinds in one group.
    groups = [{"params": parameters} for parameters in (cut, others) if parameters]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def step():
        loss = models.loss_of("gpt", model(inputs), targets)
        (loss / parts).backward()
        if parts > 1:
            all_reduce_gradients(others)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def main():
    arguments = parse_arguments()
    models.run_program("tensor.py", arguments, lambda: make_step(arguments), peer="tensor",
                       sequence_parallel=arguments.sequence_parallel)


if __name__ == "__main__":
    main()
