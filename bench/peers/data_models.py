# SPDX-License-Identifier: Apache-2.0
"""What the programs that train with PyTorch in parallel share: the models, and the processes that are ranks.

gpt: pre-LayerNorm blocks, exact gelu, learned positions, the head tied to the embedding; tokens to logits.
mlp: square Linear layers with relu between them. Neither has dropout, and TorchScript can compile both.
make_untied(): gpt with a head of its own, as a list of modules that can be cut anywhere.
"""
import collections
import ctypes
import datetime
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time

try:
    import torch
except ImportError:
    sys.exit(f"{os.path.basename(sys.argv[0])}: this python3 has no torch; run it with the one of ./dev setup "
             "(.deps/python/bin/python)")
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SIZES = {"gpt": {"vocab": 1024, "sequence": 256, "dim": 256, "heads": 4, "ffn": 1024, "blocks": 4},
         "gpt2": {"vocab": 50304, "sequence": 1024, "dim": 768, "heads": 12, "ffn": 3072, "blocks": 12},
         "mlp": {"width": 1024, "layers": 16}}
CALL_S = 60  # the most one collective may take
START_S = 180  # for imports, the rendezvous and the first steps
STEP_S = 30  # the most one step may take
IDLE_S = 3600  # the most between two commands
MAX_STEPS = 10000
CHECKED = 3  # steps of which --check compares the losses


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, ffn: int):
        super().__init__()
        self.heads = heads
        self.gelu = "none"
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, ffn)
        self.down = nn.Linear(ffn, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.gelu))


class Gpt(nn.Module):
    def __init__(self, vocab: int, sequence: int, dim: int, heads: int, ffn: int, blocks: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(sequence, dim)
        self.layers = nn.ModuleList([Block(dim, heads, ffn) for _ in range(blocks)])
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position.weight[:tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Embed(nn.Module):
    def __init__(self, vocab: int, sequence: int, dim: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(sequence, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens) + self.position.weight[:tokens.size(1)]


class Mlp(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x if index == 0 else F.relu(x))
        return x


def make_model(name, sizes):
    return (Mlp if name == "mlp" else Gpt)(**sizes)


def make_untied(sizes, block=Block):
    dim, vocab = sizes["dim"], sizes["vocab"]
    return nn.Sequential(Embed(vocab, sizes["sequence"], dim),
                         *(block(dim, sizes["heads"], sizes["ffn"]) for _ in range(sizes["blocks"])),
                         nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False))


def make_data(name, sizes, *leading):
    """Inputs and targets with these leading dimensions: next tokens of gpt, any numbers of mlp."""
    if name != "mlp":
        tokens = torch.randint(sizes["vocab"], (*leading, sizes["sequence"] + 1))
        return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
    return torch.randn(*leading, sizes["width"]), torch.randn(*leading, sizes["width"])


def loss_of(name, outputs, targets):
    if name != "mlp":
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return (outputs - targets).square().sum(1).mean()


def shard(model, reshard_after_forward=True):
    """FSDP2: each layer is a unit of its own, and what is left belongs to the root."""
    from torch.distributed.fsdp import fully_shard
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)


class Ranks:
    """This program again, once for each rank. Every wait has a deadline; a rank that fails ends it with the cause."""

    def __init__(self, count, threads, start_seconds):
        # This process holds the store, so its port is bound before anyone is told of it.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                   timeout=datetime.timedelta(seconds=start_seconds))
        # The MALLOC_ ones let the ranks keep the memory that every step takes.
        environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS=str(threads), MALLOC_MMAP_MAX_="0",
                           MALLOC_TRIM_THRESHOLD_="-1", MALLOC_TOP_PAD_=str(64 << 20))
        command = [sys.executable, *sys.argv, "--parent", str(os.getpid()), "--port", str(self.store.port), "--rank"]
        self.selector, self.children = selectors.PollSelector(), []
        self.lines, self.rests = collections.defaultdict(collections.deque), collections.defaultdict(bytes)
        for rank in range(count):
            self.children.append(subprocess.Popen([*command, str(rank)], env=environment, bufsize=0,
                                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            self.selector.register(self.children[rank].stdout, selectors.EVENT_READ, rank)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in self.children:
            child.kill()
            child.wait()

    def listen_to_stdin(self):
        self.selector.register(0, selectors.EVENT_READ, "stdin")

    def next_line(self, name, seconds, what):
        """From a rank or from "stdin", whose end reads as "quit"."""
        deadline = time.monotonic() + seconds
        while not self.lines[name]:
            events = self.selector.select(max(0, deadline - time.monotonic()))
            if not events:
                raise RuntimeError(f"{what} took longer than {seconds} s")
            for key, _ in events:
                data = os.read(key.fd, 65536)
                if not data:
                    self.selector.unregister(key.fileobj)
                    if key.data != "stdin":
                        raise RuntimeError(self.cause(f"rank {key.data} ended early"))
                    data = b"\nquit\n"
                *lines, self.rests[key.data] = (self.rests[key.data] + data).split(b"\n")
                self.lines[key.data].extend(line.decode(errors="replace") for line in lines)
                if key.data != "stdin" and lines and "error" in json.loads(lines[-1]):
                    raise RuntimeError(self.cause(f"rank {key.data}: {json.loads(lines[-1])['error']}"))
        return self.lines[name].popleft()

    def answers(self, seconds, what):
        return [json.loads(self.next_line(rank, seconds, what)) for rank in range(len(self.children))]

    def tell(self, line):
        try:
            for child in self.children:
                child.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise RuntimeError(self.cause("a rank ended early")) from None

    def cause(self, message):
        """That, unless another rank was killed and this one only noticed."""
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            for rank, child in enumerate(self.children):
                if (child.poll() or 0) < 0:
                    return f"rank {rank} was killed by signal {-child.returncode}"
            time.sleep(0.02)
        return message

    def finish(self, seconds):
        for child in self.children:
            child.stdin.close()
        for rank, child in enumerate(self.children):
            if child.wait(seconds):
                raise RuntimeError(self.cause(f"rank {rank} failed at its end"))


def be_rank(arguments, threads, together, work):
    """In a rank: work(answer), between joining the others and leaving them if they work together."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank dies with the process that started it
    if os.getppid() != arguments.parent:
        os._exit(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not look like an answer

    def answer(**values):
        print(json.dumps(values), file=answers, flush=True)

    try:
        torch.set_num_threads(threads)
        if together:
            timeout = datetime.timedelta(seconds=CALL_S)
            store = dist.TCPStore("127.0.0.1", arguments.port, is_master=False, timeout=timeout)
            dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=arguments.ranks,
                                    timeout=timeout)
        work(answer)
        sys.stdin.read()  # until all have answered
        if together:
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001
        answer(error=f"{type(error).__name__}: {error}".splitlines()[0])
        os._exit(1)  # not through destructors that wait for the others


def obey(step, answer, together=True, synchronize=lambda: None, release=None):
    """In a rank: three steps, then as many as each line of stdin says. A step gives its loss, or None.

    release() gives back what a device keeps; then every run begins with a step that is not measured."""

    def run(count):
        if together:
            dist.barrier()
        if release:
            step()
            synchronize()
        start = time.perf_counter()
        for _ in range(count):
            loss = step()
        synchronize()
        seconds = time.perf_counter() - start
        if loss is not None and not math.isfinite(loss.item()):
            raise ArithmeticError(f"the loss is {loss.item()}")
        del loss
        if release:
            release()
        answer(seconds=seconds)

    run(3)
    for line in sys.stdin:  # blocks until the starting process writes, or is gone
        run(int(line))


def serve(count, threads, **labels):
    """In the starting process: does what stdin says with ranks that obey, and prints the slowest one's time."""
    with Ranks(count, threads, START_S) as ranks:
        ranks.answers(START_S, "the start")
        print(json.dumps({"ready": True}), flush=True)
        ranks.listen_to_stdin()
        while (line := ranks.next_line("stdin", IDLE_S, "the wait for a command").split()) != ["quit"]:
            if not line:
                continue
            if len(line) != 2 or line[0] != "run" or not line[1].isdecimal() or not 1 <= int(line[1]) <= MAX_STEPS:
                raise RuntimeError(f"wanted 'run N' with N of 1 to {MAX_STEPS}, or 'quit', not '{' '.join(line)}'")
            steps = int(line[1])
            ranks.tell(line[1])
            seconds = max(answer["seconds"] for answer in ranks.answers(STEP_S * (steps + 2), f"{steps} steps"))
            print(json.dumps({**labels, "steps": steps, "seconds": round(seconds, 6)}), flush=True)
        ranks.finish(START_S)


def tell_losses(step, answer):
    """In a rank: the losses of the first steps, if it has them."""
    losses = [step() for _ in range(CHECKED)]
    answer(losses=[loss.item() for loss in losses if loss is not None])


def check(count, threads, make_step):
    """In the starting process: prints the mean of the losses that ranks tell, and those of steps made here alone."""
    with Ranks(count, threads, START_S) as ranks:
        told = [answer["losses"] for answer in ranks.answers(START_S, "the check") if answer["losses"]]
        ranks.finish(START_S)
    torch.set_num_threads(threads)
    step = make_step()
    whole = [step().item() for _ in range(CHECKED)]
    losses = [sum(of_ranks) / len(told) for of_ranks in zip(*told)]
    print(json.dumps({"losses": losses, "whole": whole}), flush=True)
    if not all(abs(loss - wanted) <= 1e-5 * abs(wanted) for loss, wanted in zip(losses, whole, strict=True)):
        raise RuntimeError("the losses differ from those of one process")


def run_program(name, arguments, make_step, **labels):
    """All of a program with --check whose ranks work together. make_step() is called in each, and alone to check."""
    if arguments.rank is not None:
        work = tell_losses if arguments.check else obey
        be_rank(arguments, arguments.threads, True, lambda answer: work(make_step(), answer))
        return
    try:
        if arguments.check:
            check(arguments.ranks, arguments.threads, make_step)
        else:
            serve(arguments.ranks, arguments.threads, **labels)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"{name}: {error}")
