#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small model with PyTorch alone, under DDP and under FSDP2, as the reference of a parity test.

Into the folder go model.pt, a TorchScript module with the start weights (of gpt from tokens to logits, of mlp from
rows to rows), and data.pt, one with the buffers `inputs` and `targets` ([steps, 4, ...]: a global batch of 4 for
each step). All three trainings read them back from there. AdamW decays only parameters of 2 or more dimensions.
Under DDP and FSDP2 each rank is a process with an equal share of the batch's rows; gloo over loopback. All is
float32 with one thread.

One JSON object on stdout: for each training the loss of each step, before that step's update, averaged over the
global batch. Exit 1 if a rank fails or a deadline passes, with the first cause on stderr; 2 for bad arguments.
"""
import argparse
import json
import os
import subprocess
import sys
import warnings

SIZES = {"gpt": {"vocab": 64, "sequence": 16, "dim": 32, "heads": 2, "ffn": 128, "blocks": 2},
         "mlp": {"width": 32, "layers": 4}}
BATCH = 4
DEADLINE_S = 240


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "mlp"), required=True)
    parser.add_argument("--folder", required=True, help="an existing one, for model.pt and data.pt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    for name in ("--rank", "--port", "--parent"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks < 1 or BATCH % arguments.ranks or arguments.steps < 1:
        parser.error(f"--ranks wants a divisor of {BATCH}, --steps 1 or more")
    if not os.path.isdir(arguments.folder):
        parser.error(f"--folder wants an existing folder, not {arguments.folder}")
    return arguments


def write_files(torch, models, arguments):
    class Data(torch.nn.Module):
        def __init__(self, inputs, targets):
            super().__init__()
            self.register_buffer("inputs", inputs)
            self.register_buffer("targets", targets)

        def forward(self):
            return self.inputs, self.targets

    torch.manual_seed(3)
    model = models.make_model(arguments.model, SIZES[arguments.model])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:  # biases and norms, so that they matter
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    data = models.make_data(arguments.model, SIZES[arguments.model], arguments.steps, BATCH)
    torch.jit.script(model).save(os.path.join(arguments.folder, "model.pt"))
    torch.jit.script(Data(*data)).save(os.path.join(arguments.folder, "data.pt"))


def train(torch, models, arguments, wrap, rank, ranks):
    """The losses, each the mean of this rank's rows."""
    model = models.make_model(arguments.model, SIZES[arguments.model])
    model.load_state_dict(torch.jit.load(os.path.join(arguments.folder, "model.pt")).state_dict())
    data = torch.jit.load(os.path.join(arguments.folder, "data.pt"))
    model = wrap(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": 0.1},
         {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.999), eps=1e-8, fused=True)
    rows = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    losses = []
    for inputs, targets in zip(data.inputs, data.targets):
        loss = models.loss_of(arguments.model, model(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_all(torch, models, arguments):
    write_files(torch, models, arguments)
    with models.Ranks(arguments.ranks, 1, DEADLINE_S) as ranks:
        torch.set_num_threads(1)
        losses = {"alone": train(torch, models, arguments, lambda model: model, 0, 1)}
        answers = ranks.answers(DEADLINE_S, "training")
        ranks.finish(DEADLINE_S)
    for peer in ("ddp", "fsdp2"):
        losses[peer] = [sum(step) / arguments.ranks for step in zip(*(answer[peer] for answer in answers))]
    print(json.dumps(losses))


def main():
    arguments = parse_arguments()
    try:
        import torch
    except ImportError:
        sys.exit("pytorch_reference.py: this python3 has no torch; run it with .deps/python/bin/python")
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../bench/peers"))
    import data_models as models
    warnings.filterwarnings("ignore", message=".*torch.jit.*")  # TorchScript is what C++ can load
    if arguments.rank is not None:
        wraps = {"ddp": torch.nn.parallel.DistributedDataParallel, "fsdp2": models.shard}
        models.be_rank(arguments, 1, True, lambda answer: answer(**{
            peer: train(torch, models, arguments, wrap, arguments.rank, arguments.ranks)
            for peer, wrap in wraps.items()}))
        return
    try:
        run_all(torch, models, arguments)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"pytorch_reference.py: {error}")


if __name__ == "__main__":
    main()
