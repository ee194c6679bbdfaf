# SPDX-License-Identifier: Apache-2.0
"""Models for tests/flow_test.sh: net.pt and net.pt2 (the same weights), picky.pt (throws at large
values) and hangs.pt (comes never back from them), into the folder named."""
import sys

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = torch.nn.Linear(2, 16), torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor):
        return self.down(torch.tanh(self.up(x)))


class Picky(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        if bool((x > 1e6).any()):
            raise RuntimeError("too large")
        return x * 2


class Hangs(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        while bool((x > 1e6).any()):
            x = x + 0
        return x


class Both(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return {"high": x + 100, "low": x - 100}


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x, {"b": x + 1, "a": x + 2}


folder = sys.argv[1]
net = Net()
torch.jit.script(net).save(folder + "/net.pt")
torch.jit.script(Picky()).save(folder + "/picky.pt")
torch.jit.script(Nested()).save(folder + "/nested.pt")
torch.jit.script(Both()).save(folder + "/both.pt")
torch.jit.script(Hangs()).save(folder + "/hangs.pt")
rows = torch.export.Dim("b", min=2, max=256)
exported = torch.export.export(net, (torch.randn(4, 2),), dynamic_shapes=({0: rows},))
torch._inductor.aoti_compile_and_package(exported, package_path=folder + "/net.pt2")
