#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Clients that others wrote, against a server that serves the models of serve_models.py.

serve_clients.py HOST:PORT HOST:PORT: the addresses for HTTP and gRPC. One line for each client; exit 1 if one failed.
Each runs in a process of its own: kserve and tritonclient both register the protocol's messages and cannot share one.
"""
import argparse
import asyncio
import contextlib
import functools
import gzip
import inspect
import json
import logging
import queue
import re
import subprocess
import sys
import tempfile
import time

import numpy as np
from serve_models import NUMBERS, TYPES

STREAM = 200
DEADLINE_S = 20  # of one check
CHECKS = {}


def check(*clients):
    """Adds a check to the clients named; a prefix stands for all that start with it."""
    def add(function):
        for client in CLIENTS:
            if any(client == name or client.startswith(name + ".") for name in clients):
                CHECKS.setdefault(client, []).append(function)
        return function
    return add


def sample(datatype, rows=3):
    """[rows, 2] values of a datatype, with the ends of its range."""
    if datatype == "BOOL":
        return np.array([[True, False]] * rows)
    if datatype == "BF16":
        import ml_dtypes
        return np.array([[1.5, -3.140625]] * rows, dtype=ml_dtypes.bfloat16)
    dtype = np.dtype({"FP": "float", "IN": "int", "UI": "uint"}[datatype[:2]] + re.search(r"\d+", datatype)[0])
    ends = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    values = np.array([[ends.min, ends.max]] * rows, dtype=dtype)
    values[0] = [1, 0]
    return values


def rows_of(number, rows=1):
    return np.arange(number, number + rows * 16, dtype=np.float32).reshape(rows, 16)


# 16 MiB: past the limit of 4 MiB that gRPC has if nobody lifts it, and more than a millisecond's work.
MUCH = np.array([bytes([65 + i]) * 2**20 for i in range(16)], dtype=np.object_)
WORDS = [b"one", b"", "\u00e4\u65e5\U0001f600".encode(), b"a\0b", b"\"\\\n"]


class Triton:
    """One of tritonclient's four clients behind one face: everything is awaited, metadata is JSON."""

    def __init__(self, name, http, grpc):
        self.name, self.is_grpc, self.is_aio = name, ".grpc" in name, name.endswith(".aio")
        self.url = grpc if self.is_grpc else http
        if self.is_grpc:
            import tritonclient.grpc as base
            import tritonclient.grpc.aio as aio
        else:
            import tritonclient.http as base
            import tritonclient.http.aio as aio
        from tritonclient.utils import InferenceServerException
        self.error, self.base, self.aio = InferenceServerException, base, aio
        self.client = self.make()

    def make(self, **options):
        if not self.is_grpc and not self.is_aio:
            options = {"concurrency": 8, **options}
        return (self.aio if self.is_aio else self.base).InferenceServerClient(self.url, **options)

    async def close(self):
        closed = self.client.close()
        if inspect.isawaitable(closed):
            await closed

    async def call(self, method, *arguments, client=None, **options):
        result = getattr(client or self.client, method)(*arguments, **options)
        return await result if inspect.isawaitable(result) else result

    async def about(self, method, *arguments, **options):
        if self.is_grpc:
            options["as_json"] = True
        return await self.call(method, *arguments, **options)

    def input(self, name, values, datatype, binary=True, shape=None):
        tensor = self.base.InferInput(name, list(shape or values.shape), datatype)
        if self.is_grpc:
            return tensor.set_data_from_numpy(values)
        return tensor.set_data_from_numpy(values, binary_data=binary)

    def output(self, name, binary=True):
        output = self.base.InferRequestedOutput
        return output(name) if self.is_grpc else output(name, binary_data=binary)

    def x(self, values, binary=True):
        return [self.input("x", values, "FP32", binary)]

    async def infer(self, model, inputs, **options):
        return await self.call("infer", model, inputs, **options)

    async def good(self, **options):
        """An ordinary request, to see that the server still answers."""
        values = rows_of(5)
        result = await self.infer("double", self.x(values), **options)
        assert np.array_equal(result.as_numpy("y"), 2 * values), f"2x was wanted, not {result.as_numpy('y')}"
        return result

    def id(self, result):
        response = result.get_response()
        return response.id if self.is_grpc else response.get("id", "")

    async def refused(self, status, pattern, model, inputs, **options):
        """status: of HTTP and of gRPC. The message must match the pattern."""
        try:
            await self.infer(model, inputs, **options)
        except self.error as error:
            wanted = "StatusCode." + status[1] if self.is_grpc else str(status[0])
            assert error.status() == wanted, f"status {error.status()}, not {wanted}: {error.message()}"
            assert re.search(pattern, error.message()), f"the message does not match {pattern}: {error.message()}"
            return
        raise AssertionError(f"not refused: {pattern}")


CLIENTS = ("tritonclient.http", "tritonclient.http.aio", "tritonclient.grpc", "tritonclient.grpc.aio", "kserve.rest",
           "kserve.grpc", "curl")
BAD, UNKNOWN, FAILED = (400, "INVALID_ARGUMENT"), (404, "NOT_FOUND"), (500, "INTERNAL")


@check("tritonclient")
async def health(c):
    assert await c.call("is_server_live") is True, "not live"
    assert await c.call("is_server_ready") is True, "not ready"
    assert await c.call("is_model_ready", "double") is True, "double is not ready"
    assert await c.call("is_model_ready", "double", "1") is True, "version 1 of double is not ready"
    assert await c.call("is_model_ready", "nobody") is False, "an unknown model is ready"
    assert await c.call("is_model_ready", "double", "7") is False, "an unknown version is ready"


@check("tritonclient")
async def server_metadata(c):
    found = await c.about("get_server_metadata")
    assert found["name"] and found["version"], f"no name or version in {found}"
    missing = {"binary_tensor_data", "model_configuration", "model_repository", "statistics"} - set(found["extensions"])
    assert not missing, f"extensions lack {missing}"


@check("tritonclient")
async def model_metadata(c):
    ports = lambda entries: [(entry["name"], entry["datatype"], [int(dim) for dim in entry["shape"]])  # noqa: E731
                             for entry in entries]
    found = await c.about("get_model_metadata", "double")
    assert found["name"] == "double" and found["versions"] == ["1"], f"name or versions of {found}"
    assert ports(found["inputs"]) == [("x", "FP32", [-1, 16])], f"inputs of {found}"
    assert ports(found["outputs"]) == [("y", "FP32", [-1, 16])], f"outputs of {found}"
    assert found == await c.about("get_model_metadata", "double", "1"), "version 1 differs from the model"
    found = await c.about("get_model_metadata", "types")
    assert ports(found["inputs"]) == [(name, TYPES[name], [-1, 2]) for name in TYPES], f"inputs of {found}"
    found = await c.about("get_model_metadata", "words")
    assert ports(found["inputs"]) == [("text", "BYTES", [-1])], f"inputs of {found}"
    for arguments in (("nobody",), ("double", "7")):
        try:
            await c.about("get_model_metadata", *arguments)
            raise AssertionError(f"metadata of {arguments}")
        except c.error as error:
            assert arguments[0] in error.message(), f"the model is not named in: {error.message()}"


@check("tritonclient")
async def model_config(c):
    async def config(name):
        found = await c.about("get_model_config", name)
        return found["config"] if c.is_grpc else found
    ports = lambda entries: [(entry["name"], entry["data_type"], [int(dim) for dim in entry["dims"]])  # noqa: E731
                             for entry in entries]
    found = await config("double")
    assert found["name"] == "double" and int(found["max_batch_size"]) == 8, f"name or max_batch_size of {found}"
    assert ports(found["input"]) == [("x", "TYPE_FP32", [16])], f"input of {found}"
    assert ports(found["output"]) == [("y", "TYPE_FP32", [16])], f"output of {found}"
    found = await config("words")
    assert int(found.get("max_batch_size", 0)) == 0, f"max_batch_size of {found}"
    assert ports(found["input"]) == [("text", "TYPE_STRING", [-1])], f"input of {found}"
    found = await config("types")
    assert ports(found["input"]) == [(name, "TYPE_" + datatype, [2]) for name, datatype in TYPES.items()], f"{found}"


@check("tritonclient")
async def statistics(c):
    async def counts():
        entry = (await c.about("get_inference_statistics", "double"))["model_stats"][0]
        assert entry["name"] == "double" and entry["version"] == "1", f"name or version of {entry}"
        stats = entry.get("inference_stats", {})
        durations = [int(stats.get(part, {}).get("ns", 0)) for part in ("success", "queue", "compute_infer")]
        return [int(entry.get("inference_count", 0)), int(entry.get("execution_count", 0)),
                int(stats.get("success", {}).get("count", 0)), int(stats.get("fail", {}).get("count", 0)), *durations]
    before = await counts()
    for _ in range(3):
        await c.infer("double", c.x(rows_of(0, 2)))
    after = await counts()
    assert after[0] - before[0] == 6, f"3 requests of 2 rows are not 6 inferences: {before} {after}"
    assert after[1] - before[1] == 3, f"3 requests one by one are not 3 executions: {before} {after}"
    assert after[2] - before[2] == 3 and after[3] == before[3], f"3 requests are not 3 successes: {before} {after}"
    assert all(late > early for early, late in zip(before[4:], after[4:])), f"durations stand still: {before} {after}"
    names = {entry["name"] for entry in (await c.about("get_inference_statistics"))["model_stats"]}
    assert names >= {"double", "types", "words", "fails"}, f"statistics of all models are of {names}"


@check("tritonclient")
async def repository_index(c):
    found = await c.about("get_model_repository_index")
    found = found["models"] if c.is_grpc else found
    states = {entry["name"]: entry["state"] for entry in found}
    for name in ("double", "types", "numbers", "words", "fails"):
        assert states.get(name) == "READY", f"{name} is not READY in {found}"


@check("tritonclient")
async def infer_rows(c):
    for rows in range(1, 9):
        values = rows_of(rows, rows)
        result = await c.infer("double", c.x(values))
        assert np.array_equal(result.as_numpy("y"), 2 * values), f"{rows} rows: {result.as_numpy('y')}"


@check("tritonclient")
async def infer_every_datatype(c):
    given = {name: sample(datatype) for name, datatype in TYPES.items()}
    result = await c.infer("types", [c.input(name, given[name], datatype) for name, datatype in TYPES.items()])
    for name, values in given.items():
        found = result.as_numpy("out_" + name)
        assert found.dtype == values.dtype and np.array_equal(found, values), f"{name}: {found}, not {values}"


@check("tritonclient.http")
async def infer_every_datatype_as_json(c):
    given = {name: sample(datatype) for name, datatype in NUMBERS.items()}
    inputs = [c.input(name, given[name], datatype, binary=False) for name, datatype in NUMBERS.items()]
    result = await c.infer("numbers", inputs, outputs=[c.output("out_" + name, binary=False) for name in NUMBERS])
    for name, values in given.items():
        assert "data" in result.get_output("out_" + name), f"{name} came back as binary"
        found = result.as_numpy("out_" + name)
        assert np.array_equal(found, values), f"{name}: {found}, not {values}"


@check("tritonclient.http")
async def infer_mixed_encodings(c):
    given = {name: sample(datatype) for name, datatype in NUMBERS.items()}
    inputs = [c.input(name, given[name], NUMBERS[name], binary=i % 2 == 0) for i, name in enumerate(NUMBERS)]
    result = await c.infer("numbers", inputs, outputs=[c.output("out_" + name, binary=i % 3 == 0)
                                                       for i, name in enumerate(NUMBERS)])
    for name, values in given.items():
        assert np.array_equal(result.as_numpy("out_" + name), values), f"{name}: {result.as_numpy('out_' + name)}"


@check("tritonclient")
async def infer_special_floats(c):
    values = np.array([[np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38, 0.1, 1] * 2], dtype=np.float32)
    found = (await c.infer("double", c.x(values))).as_numpy("y")
    with np.errstate(over="ignore"):
        wanted = 2 * values
    assert np.array_equal(found, wanted, equal_nan=True) and np.signbit(found[0, 3]), f"{found}, not {wanted}"


@check("tritonclient")
async def infer_bytes(c):
    words = np.array([*WORDS, b"\xff\xfe"], dtype=np.object_)
    found = (await c.infer("words", [c.input("text", words, "BYTES")])).as_numpy("loud")
    assert found.tolist() == [word + b"!" for word in words], f"{found}"


@check("tritonclient.http")
async def infer_bytes_as_json(c):
    words = np.array(WORDS, dtype=np.object_)
    for binary_in, binary_out in ((False, False), (False, True), (True, False)):
        result = await c.infer("words", [c.input("text", words, "BYTES", binary_in)],
                               outputs=[c.output("loud", binary_out)])
        found = [word if isinstance(word, bytes) else word.encode() for word in result.as_numpy("loud").tolist()]
        assert found == [word + b"!" for word in WORDS], f"{binary_in} {binary_out}: {found}"


@check("tritonclient")
async def infer_much(c):
    found = (await c.infer("words", [c.input("text", MUCH, "BYTES")])).as_numpy("loud")
    assert found.tolist() == [word + b"!" for word in MUCH], "16 MiB came back changed"


@check("tritonclient")
async def requested_outputs(c):
    given = [c.input(name, sample(datatype), datatype) for name, datatype in TYPES.items()]
    result = await c.infer("types", given, outputs=[c.output("out_i16"), c.output("out_b")])
    names = sorted(output.name if c.is_grpc else output["name"] for output in
                   (result.get_response().outputs if c.is_grpc else result.get_response()["outputs"]))
    assert names == ["out_b", "out_i16"], f"asked for out_i16 and out_b, got {names}"
    assert np.array_equal(result.as_numpy("out_i16"), sample("INT16")), f"{result.as_numpy('out_i16')}"


@check("tritonclient")
async def names_and_ids(c):
    result = await c.good(request_id="row 17 \u00e4")
    response = result.get_response()
    model, version = (response.model_name, response.model_version) if c.is_grpc else (
        response["model_name"], response["model_version"])
    assert (model, version) == ("double", "1"), f"answered by {model} {version}"
    assert c.id(result) == "row 17 \u00e4", f"id {c.id(result)!r}"
    assert c.id(await c.good()) == "", "an id that nobody gave"


@check("tritonclient")
async def options_of_a_request(c):
    await c.good(model_version="1")
    await c.good(priority=1)
    await c.good(timeout=10_000_000)
    await c.good(parameters={"colour": "red", "count": 3, "flag": True})
    await c.good(headers={"x-colour": "red"})
    await c.good(sequence_id=5, sequence_start=True, sequence_end=True)


@check("tritonclient")
async def errors_name_the_input(c):
    wrong = lambda *shape: [c.input("x", np.zeros(shape, np.float32), "FP32")]  # noqa: E731
    await c.refused(BAD, r"\bx\b", "double", wrong(1, 15))
    await c.refused(BAD, r"\bx\b", "double", wrong(1, 17))
    await c.refused(BAD, r"\bx\b", "double", wrong(1, 16, 1))
    await c.refused(BAD, r"\bx\b", "double", [c.input("x", np.zeros((1, 16), np.int32), "INT32")])
    await c.refused(BAD, r"\bz\b", "double", [c.input("z", np.zeros((1, 16), np.float32), "FP32")])
    await c.refused(BAD, r"\bx\b", "double", [])
    await c.refused(BAD, r"\bx\b", "double", c.x(rows_of(0)) * 2)
    await c.refused(BAD, r"\bz\b", "double", c.x(rows_of(0)), outputs=[c.output("z")])
    await c.refused(BAD, r"\b8\b", "double", c.x(rows_of(0, 9)))
    missing = [c.input(name, sample(datatype), datatype) for name, datatype in TYPES.items() if name != "i8"]
    await c.refused(BAD, r"\bi8\b", "types", missing)
    uneven = [c.input(name, sample(datatype, 2 if name == "i8" else 3), datatype) for name, datatype in TYPES.items()]
    await c.refused(BAD, r"batch|rows|\bi8\b", "types", uneven)
    await c.good()


@check("tritonclient")
async def errors_of_models(c):
    await c.refused(UNKNOWN, "nobody", "nobody", c.x(rows_of(0)))
    await c.refused(UNKNOWN, "double", "double", c.x(rows_of(0)), model_version="7")
    values = np.array([[1, 2, 3, 4], [-1, 2, 3, 4]], np.float32)
    await c.refused(FAILED, "negative", "fails", c.x(values))
    found = (await c.infer("fails", c.x(np.abs(values)))).as_numpy("y")
    assert np.array_equal(found, np.abs(values)), f"after a failure: {found}"


@check("tritonclient.http")
async def compression(c):
    for coding in ("gzip", "deflate"):
        await c.good(request_compression_algorithm=coding)
        await c.good(response_compression_algorithm=coding)
        await c.good(request_compression_algorithm=coding, response_compression_algorithm=coding, request_id="a")
        values = rows_of(3, 4)
        result = await c.infer("double", c.x(values, binary=False), outputs=[c.output("y", binary=False)],
                               request_compression_algorithm=coding, response_compression_algorithm=coding)
        assert np.array_equal(result.as_numpy("y"), 2 * values), f"{coding}: {result.as_numpy('y')}"


@check("tritonclient.grpc")
async def compression_of_grpc(c):
    for coding in ("gzip", "deflate"):
        await c.good(compression_algorithm=coding)


@check("tritonclient")
async def many_at_once(c):
    """100 requests in flight: each gets its own answer."""
    def same(result, i):
        assert np.array_equal(result.as_numpy("y"), 2 * rows_of(i)), f"request {i} got {result.as_numpy('y')}"
        assert c.id(result) == f"r{i}", f"request r{i} got the answer to {c.id(result)}"
    if c.is_aio:
        results = await asyncio.gather(*(c.infer("double", c.x(rows_of(i)), request_id=f"r{i}") for i in range(100)))
        for i, result in enumerate(results):
            same(result, i)
    elif c.is_grpc:
        answers = queue.Queue()
        for i in range(100):
            c.client.async_infer("double", c.x(rows_of(i)), functools.partial(lambda i, result, error: answers.put(
                (i, result, error)), i), request_id=f"r{i}")
        for _ in range(100):
            i, result, error = answers.get(timeout=DEADLINE_S)
            assert error is None, f"request {i}: {error}"
            same(result, i)
    else:
        handles = [c.client.async_infer("double", c.x(rows_of(i)), request_id=f"r{i}") for i in range(100)]
        for i, handle in enumerate(handles):
            same(handle.get_result(timeout=DEADLINE_S), i)


@check("tritonclient")
async def many_with_errors(c):
    """Good and bad requests that may share a batch: only the bad ones fail."""
    async def one(i):
        values = rows_of(i)[:, :4] * (-1 if i % 5 == 4 else 1) + (0 if i else 1)
        try:
            result = await c.infer("fails", c.x(values))
            return i % 5 != 4 and np.array_equal(result.as_numpy("y"), values)
        except c.error:
            return i % 5 == 4
    assert all(await asyncio.gather(*(one(i) for i in range(40)))), "a good request failed or a bad one did not"


class Stream:
    """Requests over one gRPC stream, of the plain client or of aio; answers in the order in which they came."""

    def __init__(self, c):
        self.c = c

    async def run(self, requests):
        requests = [{"model_name": model, "inputs": inputs, "request_id": name} for model, inputs, name in requests]
        if self.c.is_aio:
            async def feed():
                for request in requests:
                    yield request
            return [pair async for pair in self.c.client.stream_infer(feed(), stream_timeout=DEADLINE_S)]
        answers = queue.Queue()
        self.c.client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=DEADLINE_S)
        try:
            for request in requests:
                self.c.client.async_stream_infer(**request)
            return [answers.get(timeout=DEADLINE_S) for _ in requests]
        finally:
            self.c.client.stop_stream()


@check("tritonclient.grpc")
async def stream_in_order(c):
    answers = await Stream(c).run([("double", c.x(rows_of(i)), f"r{i}") for i in range(STREAM)])
    assert len(answers) == STREAM, f"{len(answers)} answers to {STREAM} requests"
    for i, (result, error) in enumerate(answers):
        assert error is None, f"answer {i}: {error}"
        assert c.id(result) == f"r{i}", f"answer {i} is to {c.id(result)}"
        assert np.array_equal(result.as_numpy("y"), 2 * rows_of(i)), f"answer {i}: {result.as_numpy('y')}"


@check("tritonclient.grpc")
async def stream_goes_on_after_errors(c):
    wrong = [c.input("x", np.zeros((1, 15), np.float32), "FP32")]
    negative = c.x(np.array([[-1, 0, 0, 0]], np.float32))
    answers = await Stream(c).run([("double", c.x(rows_of(1)), "a"), ("double", wrong, "b"), ("nobody", wrong, "c"),
                                   ("fails", negative, "d"), ("double", c.x(rows_of(2)), "e")])
    found = {c.id(result) for result, error in answers if error is None}
    assert found == {"a", "e"}, f"answered were {found}, not a and e"
    messages = " ".join(error.message() for _, error in answers if error is not None)
    for part in (r"\bx\b", "nobody", "negative"):
        assert re.search(part, messages), f"no error speaks of {part}: {messages}"


@check("tritonclient.grpc")
async def stream_of_several_models(c):
    words = np.array([b"one"], dtype=np.object_)
    answers = await Stream(c).run([("double", c.x(rows_of(i)), f"r{i}") if i % 2 else
                                   ("words", [c.input("text", words, "BYTES")], f"r{i}") for i in range(20)])
    assert {c.id(result) for result, _ in answers} == {f"r{i}" for i in range(20)}, "not each request was answered"


@check("tritonclient.grpc")
async def stream_cancelled(c):
    if c.is_aio:
        async def feed():
            for i in range(STREAM):
                yield {"model_name": "double", "inputs": c.x(rows_of(i)), "request_id": f"r{i}"}
        stream = c.client.stream_infer(feed())
        async for _ in stream:
            stream.cancel()
            break
    else:
        answers = queue.Queue()
        c.client.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(STREAM):
            c.client.async_stream_infer("double", c.x(rows_of(i)), request_id=f"r{i}")
        c.client.stop_stream(cancel_requests=True)
    await c.good()


@check("tritonclient.grpc")
async def typed_contents(c):
    """tritonclient itself always sends raw bytes; others fill the typed fields of the message."""
    import grpc
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc import service_pb2_grpc
    fields = {"BOOL": "bool_contents", "INT64": "int64_contents", "UINT64": "uint64_contents", "FP32": "fp32_contents",
              "FP64": "fp64_contents", **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
              **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents")}

    def request(**changes):
        data = {name: changes.get(name, sample(datatype).flatten().tolist()) for name, datatype in NUMBERS.items()}
        inputs = [pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[3, 2],
                                                        contents={fields[datatype]: data[name]})
                  for name, datatype in NUMBERS.items()]
        return pb.ModelInferRequest(model_name="numbers", id="typed", inputs=inputs)

    def refused(message, pattern):
        try:
            stub.ModelInfer(message, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, f"{error.code()} {error.details()}"
            assert re.search(pattern, error.details()), f"the message does not match {pattern}: {error.details()}"
            return
        raise AssertionError(f"not refused: {pattern}")

    with grpc.insecure_channel(c.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = stub.ModelInfer(request(), timeout=DEADLINE_S)
        assert response.id == "typed" and len(response.outputs) == len(NUMBERS), f"{response}"
        assert len(response.raw_output_contents) == len(NUMBERS), "the outputs are not raw"
        for output, raw in zip(response.outputs, response.raw_output_contents):
            values = sample(output.datatype)
            assert raw == values.tobytes() and list(output.shape) == [3, 2], f"{output.name}: {raw.hex()}"
        refused(request(i32=[1, 2, 3]), r"\bi32\b")
        refused(request(f64=[0.0] * 7), r"\bf64\b")
        both = request()
        both.raw_input_contents.append(b"\0" * 6)
        refused(both, "raw_input_contents")
        x = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 16])
        refused(pb.ModelInferRequest(model_name="double", inputs=[x]), r"\bx\b|raw_input_contents|contents")
        refused(pb.ModelInferRequest(model_name="double", inputs=[x], raw_input_contents=[b"\0" * 60]), r"\bx\b")
        word = pb.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[2],
                                                     contents={"bytes_contents": [b"one", b"\xff"]})
        response = stub.ModelInfer(pb.ModelInferRequest(model_name="words", inputs=[word]), timeout=DEADLINE_S)
        assert response.raw_output_contents[0] == b"\4\0\0\0one!\2\0\0\0\xff!", f"{response.raw_output_contents}"


@check("tritonclient")
async def client_timeouts(c):
    """A client that gives up before the answer is there does no harm."""
    text = [c.input("text", MUCH, "BYTES")]
    for _ in range(3):
        if c.is_grpc:
            try:
                await c.infer("words", text, client_timeout=0.001)
                raise AssertionError("16 MiB were answered in a millisecond")
            except c.error as error:
                assert "DEADLINE_EXCEEDED" in str(error.status()), f"{error.status()} {error.message()}"
            continue
        client = c.make(conn_timeout=0.001) if c.is_aio else c.make(network_timeout=0.001)
        try:
            await c.call("infer", "words", text, client=client)
            raise AssertionError("16 MiB were answered in a millisecond")
        except (TimeoutError, asyncio.TimeoutError):
            pass
        finally:
            await c.call("close", client=client)
    await c.good()


class Kserve:
    def __init__(self, name, http, grpc):
        import kserve
        from kserve.protocol.infer_type import RequestedOutput
        logging.disable(logging.CRITICAL)  # it logs each error that it raises
        self.kserve, self.requested = kserve, RequestedOutput
        self.is_grpc, self.url = name.endswith("grpc"), "http://" + http
        self.client = (kserve.InferenceGRPCClient(grpc, timeout=DEADLINE_S) if self.is_grpc else
                       kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2", timeout=DEADLINE_S)))

    async def close(self):
        await self.client.close()

    async def call(self, method, *arguments, **options):
        before = () if self.is_grpc else (self.url,)
        return await getattr(self.client, method)(*before, *arguments, **options)

    def input(self, name, values, datatype, binary=True):
        tensor = self.kserve.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values, binary_data=binary)
        return tensor

    async def infer(self, model, inputs, outputs=(), parameters=None, **options):
        wanted = [self.requested(name, value) for name, value in outputs]
        request = self.kserve.InferRequest(model, inputs, request_id="row 17", parameters=parameters,
                                           request_outputs=wanted)
        response = await (self.call("infer", request, **options) if self.is_grpc else
                          self.call("infer", request, model_name=model, **options))
        assert response.id == "row 17" and response.model_name == model, f"{response.id} {response.model_name}"
        return {output.name: output.as_numpy() for output in response.outputs}


@check("kserve")
async def kserve_health(c):
    assert await c.call("is_server_live") is True, "not live"
    assert await c.call("is_server_ready") is True, "not ready"
    assert await c.call("is_model_ready", "double") is True, "double is not ready"
    assert await c.call("is_model_ready", "nobody") is False, "an unknown model is ready"


@check("kserve")
async def kserve_infer(c):
    values = rows_of(3, 2)
    for binary in (True, False):
        found = await c.infer("double", [c.input("x", values, "FP32", binary)])
        assert np.array_equal(found["y"], 2 * values), f"binary {binary}: {found}"


@check("kserve")
async def kserve_every_datatype(c):
    given = {name: sample(datatype) for name, datatype in NUMBERS.items()}
    for binary in (True, False):
        found = await c.infer("numbers", [c.input(name, given[name], NUMBERS[name], binary) for name in NUMBERS])
        for name, values in given.items():
            assert np.array_equal(found["out_" + name], values), f"binary {binary}, {name}: {found['out_' + name]}"


@check("kserve.rest")
async def kserve_binary_answers(c):
    values = rows_of(3, 2)
    for options in ({"parameters": {"binary_data_output": True}}, {"outputs": [("y", {"binary_data": True})]},
                    {"outputs": [("y", {"binary_data": False})]}):
        found = await c.infer("double", [c.input("x", values, "FP32")], **options)
        assert np.array_equal(found["y"], 2 * values), f"{options}: {found}"
    body = {"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [rows_of(1)[0].tolist()]}]}
    response = await c.call("infer", body, model_name="double")
    assert np.array_equal(response.outputs[0].as_numpy(), 2 * rows_of(1)), f"a plain dict: {response}"


@check("kserve")
async def kserve_bytes(c):
    words = np.array(WORDS, dtype=np.object_)
    for binary in (True, False):
        found = (await c.infer("words", [c.input("text", words, "BYTES", binary)]))["loud"].tolist()
        found = [word if isinstance(word, bytes) else word.encode() for word in found]
        assert found == [word + b"!" for word in WORDS], f"binary {binary}: {found}"


@check("kserve")
async def kserve_requested_outputs(c):
    given = [c.input(name, sample(datatype), datatype) for name, datatype in NUMBERS.items()]
    found = await c.infer("numbers", given, outputs=[("out_i16", None), ("out_b", None)])
    assert sorted(found) == ["out_b", "out_i16"], f"{found}"


@check("kserve")
async def kserve_errors(c):
    """The REST client reads the message of an error only if its type is exactly application/json."""
    import grpc
    import httpx
    for pattern, model, shape in ((r"\bx\b", "double", (1, 15)), ("nobody", "nobody", (1, 16))):
        try:
            await c.infer(model, [c.input("x", np.zeros(shape, np.float32), "FP32")])
            raise AssertionError(f"not refused: {pattern}")
        except grpc.RpcError as error:
            text = error.details()
        except httpx.HTTPStatusError as error:
            text = str(error).split(" for url ")[0]
        assert re.search(pattern, text), f"the message does not match {pattern}: {text}"


@check("kserve")
async def kserve_many_at_once(c):
    async def one(i):
        found = await c.infer("double", [c.input("x", rows_of(i), "FP32")])
        assert np.array_equal(found["y"], 2 * rows_of(i)), f"request {i} got {found}"
    await asyncio.gather(*(one(i) for i in range(100)))


@check("kserve")
async def kserve_timeout(c):
    import grpc
    import httpx
    try:
        await c.infer("words", [c.input("text", MUCH, "BYTES")], timeout=0.001)
        raise AssertionError("16 MiB were answered in a millisecond")
    except (grpc.RpcError, httpx.TimeoutException):
        pass
    await kserve_infer(c)


class Curl:
    def __init__(self, name, http, grpc):
        self.url = "http://" + http
        subprocess.run(["curl", "--version"], check=True, stdout=subprocess.DEVNULL)

    async def close(self):
        pass

    def run(self, *arguments, paths=("/v2/models/double/infer",)):
        """Bodies of the answers and, for each, what curl knows about the transfer."""
        mark = "\n%{http_code} %{num_connects} %{time_total} %{content_type}\n--\n"
        command = ["curl", "-sS", "-m", str(DEADLINE_S), "-w", mark, *arguments, *(self.url + path for path in paths)]
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S + 5)
        assert done.returncode == 0, f"curl ended with {done.returncode}: {done.stderr.decode()}"
        answers = []
        for piece in done.stdout.split(b"\n--\n")[:-1]:
            body, _, info = piece.rpartition(b"\n")
            code, connects, total, *kind = info.decode().split(" ", 3)
            answers.append((int(code), body, int(connects), float(total), "".join(kind)))
        return answers

    def infer(self, body, *arguments):
        with tempfile.NamedTemporaryFile() as file:
            file.write(body)
            file.flush()
            return self.run("--data-binary", "@" + file.name, *arguments)[0]


BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": list(range(16))}]}).encode()


def check_body(answer):
    assert answer[0] == 200, f"status {answer[0]}: {answer[1][:200]}"
    assert json.loads(answer[1])["outputs"][0]["data"] == [2 * i for i in range(16)], f"{answer[1][:300]}"


@check("curl")
async def curl_plain(c):
    answer = c.infer(BODY, "-H", "Content-Type: application/json")
    check_body(answer)
    assert answer[4] == "application/json", f"content type {answer[4]}"
    check_body(c.infer(BODY))  # sends the type of a form


@check("curl")
async def curl_expect(c):
    """Without an answer to Expect curl waits a second before it sends the body."""
    for header in ("Expect: 100-continue", "Expect:"):
        answer = c.infer(BODY, "-H", header)
        check_body(answer)
        assert answer[3] < 0.9, f"{header} took {answer[3]} s"
    big = BODY[:-1] + b" " * 3_000_000 + b"}"  # curl asks by itself from 1 MiB on
    answer = c.infer(big)
    check_body(answer)
    assert answer[3] < 0.9, f"3 MB took {answer[3]} s"


@check("curl")
async def curl_codings(c):
    check_body(c.infer(BODY, "--compressed"))
    check_body(c.infer(gzip.compress(BODY), "-H", "Content-Encoding: gzip"))
    check_body(c.infer(BODY, "-H", "Transfer-Encoding: chunked"))
    check_body(c.infer(BODY, "--http1.0"))


@check("curl")
async def curl_keeps_the_connection(c):
    answers = c.run(paths=("/v2/health/live", "/v2", "/v2/models/double", "/v2/models/nobody", "/v2/nothing",
                           "/v2/health/ready"))
    assert [answer[0] for answer in answers] == [200, 200, 200, 404, 404, 200], f"{answers}"
    assert sum(answer[2] for answer in answers) == 1, f"{sum(answer[2] for answer in answers)} connections"
    answers = c.run("--data-binary", BODY.decode(), paths=("/v2/models/double/infer",) * 3)
    for answer in answers:
        check_body(answer)
    assert sum(answer[2] for answer in answers) == 1, f"{sum(answer[2] for answer in answers)} connections"


@check("curl")
async def curl_errors(c):
    answer = c.infer(BODY.replace(b"[1, 16]", b"[1, 15]"))
    assert answer[0] in (400, 500) and json.loads(answer[1])["error"], f"{answer}"
    answer = c.infer(b"hello")
    assert answer[0] in (400, 500) and json.loads(answer[1])["error"], f"{answer}"
    answer = c.run("-X", "DELETE")[0]
    assert answer[0] == 405, f"{answer}"
    answer = c.run("-I", paths=("/v2/health/live",))[0]
    assert answer[0] in (200, 405), f"HEAD: {answer}"


async def run_client(name, http, grpc):
    """Number of checks that failed."""
    kind = Curl if name == "curl" else Kserve if name.startswith("kserve") else Triton
    client, failed, start = kind(name, http, grpc), 0, time.monotonic()
    for function in CHECKS[name]:
        try:
            await function(client)
        except Exception as error:  # the next check may still pass
            failed += 1
            print(f"{name} {function.__name__}: {type(error).__name__}: {str(error)[:600]}")
    with contextlib.suppress(Exception):
        await client.close()
    if not failed:
        print(f"{name} ok ({len(CHECKS[name])} checks, {time.monotonic() - start:.1f} s)")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("http", metavar="HTTP")
    parser.add_argument("grpc", metavar="GRPC")
    parser.add_argument("--only", choices=CLIENTS)
    parser.add_argument("--allow-missing", action="store_true", help="a package that is not installed is no failure")
    arguments = parser.parse_args()
    if arguments.only:
        try:
            return 1 if asyncio.run(run_client(arguments.only, arguments.http, arguments.grpc)) else 0
        except (ModuleNotFoundError, FileNotFoundError) as error:
            print(f"{arguments.only} missing: {error}")
            return 0 if arguments.allow_missing else 1
    codes = [subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", name]).returncode for name in CLIENTS]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
