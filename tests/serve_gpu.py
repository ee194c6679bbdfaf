#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Models for a GPU, and what a server of them must do there.

serve_gpu.py write FOLDER    net.pt, compiled.pt2, picky.pt (fails on the device where a row says so), serve.toml
serve_gpu.py ask HTTP FOLDER COLD_START_S    compares answers, breaks one worker's device and watches the others
"""
import http.client
import json
import pathlib
import sys
import threading
import time

CONFIG = """\
[serve]
http = "127.0.0.1:0"
grpc = ""
metrics = ""
[[model]]
name = "net"
path = "net.pt"
devices = "cuda:0x2"
input = ["x:FP32[-1,3,32,32]"]
batch = 8
[[model]]
name = "half"
path = "net.pt"
devices = "cuda:0"
precision = "bf16"
input = ["x:FP32[-1,3,32,32]"]
batch = 8
[[model]]
name = "compiled"
path = "compiled.pt2"
devices = "cuda:0x2"
input = ["x:FP32[-1,3,32,32]"]
batch = 8
[[model]]
name = "picky"
path = "picky.pt"
devices = "cuda:0x2"
input = ["x:INT64[-1,4]"]
batch = 8
"""


def write(folder):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers, wide = [torch.nn.Conv2d(3, 64, 3, 2, 1)], 64
            for _ in range(6):
                layers += [torch.nn.ReLU(), torch.nn.Conv2d(wide, 256, 3, 1, 1)]
                wide = 256
            self.layers, self.last = torch.nn.Sequential(*layers), torch.nn.Linear(256, 10)

        def forward(self, x):
            x = torch.nn.functional.interpolate(x, scale_factor=4.0)
            return self.last(self.layers(x).mean((2, 3)))

    class Picky(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(100, 8)

        def forward(self, x):
            return self.table(x).sum(1)

    torch.manual_seed(1)
    net, picky = Net().eval(), Picky().eval()
    torch.jit.script(net).save(str(folder / "net.pt"))
    torch.jit.script(picky).save(str(folder / "picky.pt"))
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        torch.save((x, net(x), picky(torch.arange(16).view(4, 4))), folder / "expected.pth")
        cuda = net.cuda()
        exported = torch.export.export(cuda, (x.cuda(),), dynamic_shapes={"x": {0: torch.export.Dim("b", min=1, max=64)}})
        torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "compiled.pt2"))
    (folder / "serve.toml").write_text(CONFIG)


class Client:
    def __init__(self, address):
        self.connection = http.client.HTTPConnection(address, timeout=60)

    def call(self, method, path, body=None, headers=None):
        self.connection.request(method, path, body, headers or {})
        response = self.connection.getresponse()
        return response.status, response.read()

    def infer(self, model, datatype, shape, blob, outputs=10):
        head = json.dumps({"inputs": [{"name": "x", "shape": shape, "datatype": datatype,
                                       "parameters": {"binary_data_size": len(blob)}}]}).encode()
        status, body = self.call("POST", f"/v2/models/{model}/infer", head + blob,
                                 {"Inference-Header-Content-Length": str(len(head))})
        return status, json.loads(body)

    def view(self):
        return json.loads(self.call("GET", "/v2/yoke/view")[1])


def in_threads(count, work):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads


def ask(address, folder):
    import torch
    x, wanted, picked = torch.load(folder / "expected.pth")
    client = Client(address)
    for model, tolerance in (("net", 1e-3), ("half", 5e-2), ("compiled", 1e-3)):
        for rows in (1, 2, 4):
            status, body = client.infer(model, "FP32", [rows, 3, 32, 32], x[:rows].numpy().tobytes())
            assert status == 200, body
            got = torch.tensor(body["outputs"][0]["data"]).view(rows, 10)
            assert (got - wanted[:rows]).abs().max() < tolerance * wanted.abs().max(), (model, rows)
        status, body = client.infer(model, "FP32", [1, 3, 32, 16], x[0, :, :, :16].contiguous().numpy().tobytes())
        assert status == 400, body
    print("answers: as on the CPU, from TorchScript (fp32, bf16) and from the compiled package")

    ids = torch.arange(16).view(4, 4)
    over, unready, failures, answers, slowest = threading.Event(), [], [], [0] * 4, [0.0] * 4

    def watch_ready(_):
        mine = Client(address)
        while not over.is_set():
            if mine.call("GET", "/v2/health/ready")[0] != 200:
                unready.append(time.monotonic())
            time.sleep(0.005)

    def keep_asking(i):
        mine = Client(address)
        while not over.is_set():
            begun = time.monotonic()
            status, body = mine.infer("picky", "INT64", [1, 4], ids[i].numpy().tobytes())
            answers[i] += 1
            slowest[i] = max(slowest[i], time.monotonic() - begun)
            if status != 200 or (torch.tensor(body["outputs"][0]["data"]) - picked[i]).abs().max() > 1e-4:
                failures.append(body)

    threads = in_threads(4, keep_asking) + in_threads(1, watch_ready)
    time.sleep(1)
    begun = time.monotonic()
    status, body = client.infer("picky", "INT64", [1, 4], torch.full((4,), 10**6).numpy().tobytes())
    told = time.monotonic() - begun
    assert status == 500, body
    while True:
        replicas = [one for one in client.view()["replicas"] if one["model"] == "picky"]
        if all(one["state"] == "ready" for one in replicas) or time.monotonic() - begun > 60:
            break
        time.sleep(0.02)
    back = time.monotonic() - begun
    time.sleep(1)
    over.set()
    for thread in threads:
        thread.join()
    restarts = [one["restarts"] for one in replicas]
    print(f"device assert: answered 500 after {told:.2f} s; restarts {restarts}; all replicas back after {back:.2f} s; "
          f"others: {sum(answers)} answers, {len(failures)} failed, the slowest {max(slowest):.2f} s; "
          f"not ready {len(unready)} times")
    assert sum(restarts) in (1, 2) and not failures and not unready, (failures[:1], unready[:1])

    return back


def main():
    verb, rest = sys.argv[1], sys.argv[2:]
    if verb == "write":
        folder = pathlib.Path(rest[0])
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
    else:
        back = ask(rest[0], pathlib.Path(rest[1]))
        cold = float(rest[2])
        print(f"cold start {cold:.2f} s")
        assert back <= cold + 1, (back, cold)
    return 0


if __name__ == "__main__":
    sys.exit(main())
