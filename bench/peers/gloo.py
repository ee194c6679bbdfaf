#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures gloo's collectives through torch.distributed, the way `yoke bench comm` measures its own.

Each rank is a process with one torch thread, joined over loopback TCP (gloo has no other transport on one
host). Gloo is called in its cheapest form: buffers are made once, all_reduce, broadcast and reduce work in
place, all_gather and reduce_scatter use the single-tensor calls, which need no lists and no extra copies.
Pinning the ranks to cores, or polling instead of waiting, made it several times slower on 2 cores.

Sizes are bytes of float32 as nccl-tests counts them: the buffer for all_reduce, broadcast and reduce; the
large buffer (all ranks' pieces) for all_gather, reduce_scatter and all_to_all. A size that does not divide
among the ranks is rounded down to one that does, and bandwidths use what was moved.

A sample is one call after a barrier, and lasts as long as its slowest rank. Results are verified before and
after the timing with values that depend on rank and position. One JSON object for each size on stdout;
exit 1 if a result is wrong or a rank fails, 2 for bad arguments.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys
import time

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")
START_S = 120  # for imports and the rendezvous
CALL_S = 60  # the most one collective may take
MAX_REPEATS = 20000


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="all_reduce")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="64,1048576", help="bytes, comma-separated")
    parser.add_argument("--repeats", default="auto", help="samples for each size, or auto")
    parser.add_argument("--seconds-per-size", type=float, default=1.0, help="what auto fills")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        arguments.sizes = [int(size) for size in arguments.sizes.split(",")]
        arguments.repeats = 0 if arguments.repeats == "auto" else int(arguments.repeats)
    except ValueError as error:
        parser.error(f"--sizes wants bytes as 64,1048576 and --repeats a count or auto: {error}")
    if arguments.ranks < 1 or min(arguments.sizes) < 4 or arguments.repeats < 0 or arguments.seconds_per_size <= 0:
        parser.error("--ranks wants 1 or more, --sizes 4 bytes or more, --repeats 1 or more, --seconds-per-size > 0")
    return arguments


class Case:
    """One operation on one size: buffers, the call, and what its result must be."""

    def __init__(self, torch, dist, op, rank, size, num_bytes):
        self.torch, self.op, self.rank, self.size = torch, op, rank, size
        self.piece = max(1, num_bytes // 4 // size)
        total = self.piece * size if op in ("all_gather", "reduce_scatter", "all_to_all") else max(1, num_bytes // 4)
        self.bytes = total * 4
        large, large_too, small = torch.zeros(total), torch.zeros(total), torch.zeros(self.piece)
        # The newer names where this torch has them.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self.input, self.output, self.call = {
            "all_reduce": (large, large, lambda: dist.all_reduce(large)),
            "broadcast": (large, large, lambda: dist.broadcast(large, 0)),
            "reduce": (large, large, lambda: dist.reduce(large, 0)),
            "all_gather": (small, large, lambda: gather(large, small)),
            "reduce_scatter": (large, small, lambda: reduce_scatter(small, large)),
            "all_to_all": (large, large_too, lambda: dist.all_to_all_single(large_too, large)),
        }[op]

    def values(self, rank, start, count):
        """Small whole numbers, so that float32 sums are exact."""
        return (self.torch.arange(start, start + count) % 13 + 16 * (rank + 1)).float()

    def expected(self):
        total, piece, ranks = self.bytes // 4, self.piece, range(self.size)
        first = self.rank * piece
        if self.op == "broadcast":
            return self.values(0, 0, total)
        if self.op == "all_gather":
            return self.torch.cat([self.values(rank, 0, piece) for rank in ranks])
        if self.op == "all_to_all":
            return self.torch.cat([self.values(rank, first, piece) for rank in ranks])
        if self.op == "reduce_scatter":
            return sum(self.values(rank, first, piece) for rank in ranks)
        return sum(self.values(rank, 0, total) for rank in ranks)

    def verify(self):
        self.input.copy_(self.values(self.rank, 0, self.input.numel()))
        self.call()
        # Reduce promises a result at the root only.
        right = self.op == "reduce" and self.rank != 0 or self.torch.equal(self.output, self.expected())
        self.input.zero_()  # repeated sums in place stay finite
        self.output.zero_()
        return right


def bus_factor(op, size):
    if op == "all_reduce":
        return 2 * (size - 1) / size
    return 1.0 if op in ("broadcast", "reduce") else (size - 1) / size


def run_rank(arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = arguments.rank, arguments.ranks
    timeout = datetime.timedelta(seconds=CALL_S)
    store = dist.TCPStore("127.0.0.1", arguments.port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

    def sample(case):
        dist.barrier()
        start = time.perf_counter()
        case.call()
        return time.perf_counter() - start

    def agreed(flag, reduction):
        tensor = torch.tensor([int(flag)])
        dist.all_reduce(tensor, reduction)
        return bool(tensor.item())

    def collect(case, wanted, seconds):
        """So many samples or, if that is 0, as many as the time allows; ranks agree on the end."""
        start, times, done = time.perf_counter(), [], False
        while not done:
            times += [sample(case) for _ in range(min(10, wanted - len(times)) if wanted else 10)]
            late = len(times) >= MAX_REPEATS or time.perf_counter() - start > seconds
            done = len(times) >= wanted if wanted else agreed(late, dist.ReduceOp.MAX)
        return times

    for num_bytes in arguments.sizes:
        case = Case(torch, dist, arguments.op, rank, size, num_bytes)
        right = case.verify()
        collect(case, arguments.repeats // 10, arguments.seconds_per_size / 10)  # warm-up
        times = torch.tensor(collect(case, arguments.repeats, arguments.seconds_per_size), dtype=torch.float64)
        right = case.verify() and right
        dist.all_reduce(times, dist.ReduceOp.MAX)
        verified = agreed(right, dist.ReduceOp.MIN)
        if rank == 0:
            low, median, high = torch.quantile(times, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
            alg_gbps = case.bytes / median / 1e9
            print(json.dumps({
                "backend": "gloo", "op": arguments.op, "ranks": size, "bytes": num_bytes,
                "median_us": round(median * 1e6, 3), "p10_us": round(low * 1e6, 3), "p90_us": round(high * 1e6, 3),
                "alg_gbps": round(alg_gbps, 4), "bus_gbps": round(alg_gbps * bus_factor(arguments.op, size), 4),
                "repeats": len(times), "verified": verified}), flush=True)
        if not verified:
            sys.exit(f"gloo.py: {arguments.op} of {num_bytes} bytes gave a wrong result")
    dist.barrier()
    dist.destroy_process_group()


def run_all(arguments):
    """Starts the ranks; the first that fails, or the deadline, ends them all."""
    import torch.distributed as dist

    # This process holds the store, so its port is bound before anyone is told of it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=datetime.timedelta(seconds=START_S))
    # The MALLOC_ ones let the ranks keep the scratch memory that gloo takes in every call.
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", MALLOC_MMAP_MAX_="0",
                       MALLOC_TRIM_THRESHOLD_="-1", MALLOC_TOP_PAD_=str(64 << 20))
    children = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--port",
                                  str(store.port)], env=environment) for rank in range(arguments.ranks)]
    deadline = time.monotonic() + START_S + len(arguments.sizes) * (CALL_S + 10 * arguments.seconds_per_size)
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                return "a rank failed"
            if time.monotonic() > deadline:
                return "the ranks did not finish in time"
            time.sleep(0.02)
        return None if all(child.returncode == 0 for child in children) else "a rank failed"
    finally:
        for child in children:
            child.kill()
            child.wait()


def main():
    arguments = parse_arguments()
    try:
        import torch  # noqa: F401
    except ImportError:
        sys.exit("gloo.py: this python3 has no torch; run it with the one of ./dev setup (.deps/python/bin/python)")
    if arguments.rank is not None:
        run_rank(arguments)
        return
    failure = run_all(arguments)
    if failure:
        sys.exit(f"gloo.py: {failure}")


if __name__ == "__main__":
    main()
