#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Other servers of a model y = 2x, for `yoke bench serve`: they get the same bytes from the same load generator.

litserve  LitServe, with the model in plain Python, which is its fastest for 16 floats
pytriton  nvidia-pytriton as its users write it: a function in Python, bound to a Triton that it starts
triton    the real Triton of the package nvidia-pytriton, with a model in Python (tests/serve_oracle.py)

Writes {"http": ADDRESS, "grpc": ADDRESS} to the port file when it is ready, and serves until it is ended.
"""
import argparse
import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time

import litserve

START_S = 60


class Double(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["inputs"][0]["data"]

    def batch(self, inputs):
        return inputs

    def unbatch(self, outputs):
        return outputs

    def predict(self, x):
        if self.max_batch_size > 1:
            return [[2 * value for value in row] for row in x]
        return [2 * value for value in x]

    def encode_response(self, output):
        return {"data": output}


def publish(path, addresses):
    """All of the line is there once the file is."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(addresses) + "\n")
    unfinished.rename(path)


def answers(port):
    with contextlib.suppress(OSError):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def serve_litserve(port_file, settings):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def tell():
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if answers(port):
                return publish(port_file, {"http": f"127.0.0.1:{port}"})
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    api = Double(max_batch_size=settings.batch, batch_timeout=0, api_path="/v2/models/double/infer")
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=settings.workers,
                          fast_queue=settings.fast_queue, timeout=False)
    server.run(host="127.0.0.1", port=port, num_api_servers=settings.api_servers, log_level="error",
               access_log=False, generate_client_file=False)


def serve_triton(port_file, _):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))
    import serve_oracle
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(serve_oracle.Triton(pathlib.Path(folder))) as server:
            publish(port_file, {"http": f"127.0.0.1:{server.http}", "grpc": f"127.0.0.1:{server.grpc}"})
            signal.pause()


def serve_pytriton(port_file, settings):
    import numpy
    from pytriton.decorators import batch
    from pytriton.model_config import ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig
    ports = []
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])

    @batch
    def infer(x):
        return {"y": 2 * x}

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Triton(config=TritonConfig(http_address="127.0.0.1", http_port=ports[0], grpc_address="127.0.0.1",
                                    grpc_port=ports[1], metrics_port=ports[2])) as server:
        server.bind(model_name="double", infer_func=infer, config=ModelConfig(max_batch_size=max(settings.batch, 16)),
                    inputs=[Tensor(name="x", dtype=numpy.float32, shape=(16,))],
                    outputs=[Tensor(name="y", dtype=numpy.float32, shape=(16,))])
        server.run()
        publish(port_file, {"http": f"127.0.0.1:{ports[0]}", "grpc": f"127.0.0.1:{ports[1]}"})
        signal.pause()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["litserve", "pytriton", "triton"])
    parser.add_argument("--port-file", type=pathlib.Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--api-servers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--fast-queue", action="store_true")
    settings = parser.parse_args()
    {"litserve": serve_litserve, "pytriton": serve_pytriton, "triton": serve_triton}[settings.peer](settings.port_file, settings)


if __name__ == "__main__":
    main()
