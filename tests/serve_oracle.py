#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks a real Triton server what serve_cases.py asks ours, and writes serve_answers.json.

Runs under a Python that has the package nvidia-pytriton 0.7, which carries Triton and its Python backend: the
distribution's own Python 3.11 (`python3 -m venv`), as the backend's stub is linked to its library. The models are those
of serve_models.py, written for that backend; pytriton's own proxy is not used, so the configs are ours.

--keep      serves until interrupted and prints the two addresses, for trying a client
--speed     measures requests/s in place of asking: JSON of 16 floats to `double`, 1 and 16 connections
"""
import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import serve_cases
from serve_models import NUMBERS, TYPES

START_S = 60
CONFIG = """\
backend: "python"
max_batch_size: {batch}
input [{inputs}]
output [{outputs}]
instance_group [{{ count: 1 kind: KIND_CPU }}]
{batching}
"""
MODEL = """\
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {{tensor.name(): tensor for tensor in request.inputs()}}
        {code}
"""
PORT = '{{ name: "{name}" data_type: TYPE_{datatype} dims: [{dims}] }}'


def same(table):
    """A model that gives its inputs back. BF16 has no numpy type: its memory is handed over as it is."""
    ports = lambda prefix: [(prefix + name, datatype, 2) for name, datatype in table.items()]  # noqa: E731
    return (8, ports(""), ports("out_"),
            'return pb.InferenceResponse([pb.Tensor.from_dlpack("out_" + name, given[name].to_dlpack())'
            ' if name == "bf16" else pb.Tensor("out_" + name, given[name].as_numpy()) for name in '
            f'{list(table)}])')


# Name: largest batch, inputs, outputs (name, datatype as in a config, dims), the answer.
MODELS = {
    "double": (8, [("x", "FP32", 16)], [("y", "FP32", 16)],
               'return pb.InferenceResponse([pb.Tensor("y", 2 * given["x"].as_numpy())])'),
    "types": same(TYPES), "numbers": same(NUMBERS),
    "words": (0, [("text", "STRING", -1)], [("loud", "STRING", -1)],
              'words = given["text"].as_numpy()\n'
              '        for i, word in enumerate(words):\n'
              '            words[i] = word + b"!"\n'
              '        return pb.InferenceResponse([pb.Tensor("loud", words)])'),
    "fails": (8, [("x", "FP32", 4)], [("y", "FP32", 4)],
              'x = given["x"].as_numpy()\n'
              '        if (x[:, 0] < 0).any():\n'
              '            return pb.InferenceResponse(error=pb.TritonError("a row starts with a negative value"))\n'
              '        return pb.InferenceResponse([pb.Tensor("y", x)])'),
}


def write_repository(folder):
    ports = lambda entries: ", ".join(PORT.format(name=name, datatype=datatype, dims=dims)  # noqa: E731
                                      for name, datatype, dims in entries)
    for name, (batch, inputs, outputs, code) in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG.format(
            batch=batch, inputs=ports(inputs), outputs=ports(outputs),
            batching="dynamic_batching { }" if batch else ""))
        (folder / name / "1" / "model.py").write_text(MODEL.format(code=code))


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def is_ready(port):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False


class Triton:
    """The server, started at once; close() ends it."""

    def __init__(self, folder):
        package = pathlib.Path(importlib.util.find_spec("pytriton").origin).parent
        backends = folder / "backends"
        shutil.copytree(package / "tritonserver" / "backends", backends)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        shutil.copy(package / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub",
                    backends / "python")
        write_repository(folder / "models")
        self.log = folder / "log"
        self.http, self.grpc = free_ports(2)
        self.command = [
            package / "tritonserver" / "bin" / "tritonserver", f"--model-repository={folder / 'models'}",
            f"--backend-directory={backends}", "--model-control-mode=explicit", "--load-model=*",
            "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", f"--http-port={self.http}",
            f"--grpc-port={self.grpc}", "--allow-metrics=false"]
        # The stub finds its libraries by the first and numpy through the first python3 of the second.
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(package.parent / "nvidia_pytriton.libs"),
                            "PATH": f"{sys.exec_prefix}/bin:{os.environ['PATH']}"}
        self.start()

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_S
        while not is_ready(self.http):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError("Triton did not start:\n" + self.log.read_text()[-4000:])
            time.sleep(0.2)

    def close(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def without_counts(body):
    """Statistics with every number 0, so that renewing the file changes it only where an answer has changed."""
    if isinstance(body, dict):
        return {key: without_counts(value) for key, value in body.items()}
    if isinstance(body, list):
        return [without_counts(value) for value in body]
    return body if isinstance(body, str) else 0


def ask(server, out):
    """Some requests end Triton itself: then the answer says so, and the next case finds a new server."""
    answers = {}
    for case in serve_cases.CASES:
        found = serve_cases.run_case("127.0.0.1", server.http, case)
        if any(answer["status"] == 0 for answer in found.values()) and not is_ready(server.http):
            found = {name: answer if answer["status"] else {**answer, "body": "the server ended"}
                     for name, answer in found.items()}
            print(f"{case.name}: the server ended")
            server.close()
            server.start()
        if case.view == "stats":
            found[case.name]["body"] = without_counts(found[case.name]["body"])
        answers.update(found)
    lines = [f"{json.dumps(name)}: {json.dumps(answer, sort_keys=True, separators=(',', ':'))}"
             for name, answer in sorted(answers.items())]
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(answers)} answers")


def speed(port, connections, seconds=5):
    case = serve_cases.BY_NAME["flat"]
    counts, stop = [0] * connections, time.monotonic() + seconds

    def work(i):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while time.monotonic() < stop:
            connection.request("POST", case.path, case.body)
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            counts[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=serve_cases.ANSWERS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Triton(pathlib.Path(folder))) as server:
        if arguments.keep:
            print(f"127.0.0.1:{server.http} 127.0.0.1:{server.grpc}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        elif arguments.speed:
            for connections in (1, 16):
                print(f"{connections} connections: {speed(server.http, connections):.0f} requests/s", flush=True)
        else:
            ask(server, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
