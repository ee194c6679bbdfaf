#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Raw HTTP requests, good and bad, to the models of serve_models.py, and what two servers must answer alike.

serve_cases.py HOST:PORT  sends them all and compares with serve_answers.json, which serve_oracle.py wrote from a real
Triton server. Prints the differences; exit 1 if there is one that ALLOWED does not explain. --show NAME prints the
request and both answers of one case.
"""
import argparse
import contextlib
import dataclasses
import gzip
import http.client
import json
import pathlib
import socket
import struct
import sys
import zlib

from serve_models import TYPES

TIMEOUT_S = 10
ANSWERS = pathlib.Path(__file__).with_name("serve_answers.json")
HEADERS = ("content-type", "content-encoding", "inference-header-content-length", "retry-after")

# Why our answer differs from Triton's: the statuses that we give, and the cases by their names.
REASONS = {
    "a mistake of the client's is 400; Triton says 500, which balancers take for a fault of the server": ((400,), [
        "binary_header_short", "binary_size_fraction", "binary_size_negative", "binary_size_text", "body_and_more",
        "body_array", "body_comment", "body_null", "body_number", "body_single_quotes", "body_spaces", "body_string",
        "body_text", "body_truncated", "body_twice", "body_utf16", "body_without_last_brace", "body_zeros",
        "bool_number", "bool_text", "bool_two", "chunked_with_length", "data_empty", "data_far_too_many",
        "data_hexadecimal", "data_leading_zero", "data_no_leading_zero", "data_null", "data_number", "data_object",
        "data_of_bools", "data_of_nulls", "data_of_objects", "data_of_text", "data_over_double", "data_plus_sign",
        "data_text", "data_too_few", "data_too_many", "data_trailing_comma", "datatype_missing", "datatype_null",
        "datatype_number", "dim_negative", "dim_too_huge", "dims_negative", "float64_of_bool", "gzip_truncated",
        "gzip_two_members", "id_null", "id_number", "id_object", "index_broken_json", "index_ready_text",
        "inputs_missing", "inputs_null", "inputs_object", "inputs_text", "int32_bool", "int32_exponent",
        "int32_fraction", "int32_text", "int32_whole_float", "int64_far_over", "int64_over", "load_broken_json",
        "name_missing", "name_null", "name_number", "output_binary_text", "output_name_number", "output_not_object",
        "output_without_name", "outputs_null", "outputs_object", "parameter_binary_output_text",
        "parameter_priority_negative", "parameter_priority_text", "parameter_sequence_start_text",
        "parameter_timeout_negative", "parameters_array", "parameters_nested_endless", "parameters_null",
        "parameters_text", "shape_missing", "shape_null", "shape_number", "shape_of_bools", "shape_of_floats",
        "shape_of_fractions", "shape_of_nulls", "shape_of_text", "shape_text", "uint32_negative", "uint64_negative",
        "uint64_over", "uint8_negative", "words_bool", "words_lone_surrogate", "words_null", "words_numbers"]),
    "a number that does not fit its datatype is refused; Triton cuts off its upper bits": ((400,), [
        "int8_over", "int8_under", "uint8_over", "int16_over", "uint16_over", "int32_over", "uint32_over",
        "data_over_range"]),
    "JSON has no NaN and no infinity; such values travel as binary": ((400,), [
        "data_nan", "data_infinity", "data_minus_infinity", "float64_over"]),
    "what is not JSON in UTF-8 is refused; Triton reads up to the first odd byte": ((400, 200), [
        "body_not_utf8", "body_nul", "id_nul", "words_binary_not_utf8_to_json", "index_array"]),
    "a value of the wrong kind is refused; Triton ignores it": ((400,), [
        "input_parameters_array", "output_parameters_array", "binary_header_number_and_text"]),
    "a body that is damaged or longer than what was compressed is refused": ((400,), [
        "gzip_checksum", "gzip_and_more"]),
    "names of codings have no case, and an empty one is none (RFC 9110)": ((200,), [
        "accept_upper_case", "gzip_upper_case", "coding_empty"]),
    "not there is 404 everywhere; Triton has 400, 500 or 200 in places": ((404,), [
        "model_ready_unknown", "model_ready_unknown_version", "stats_unknown", "stats_unknown_version",
        "load_unknown", "unload_unknown", "metadata_version_huge"]),
    "a model's name in a path may be percent-encoded, as clients do": ((200,), [
        "percent_name", "metadata_percent_name"]),
    "generate is for models of words": ((501,), [
        "generate", "generate_broken_json", "generate_cannot", "generate_stream_cannot", "generate_words"]),
    "memory shared with clients is not offered": ((404, 501), [
        "cuda_memory_status", "cuda_memory_unregister_all", "system_memory_register_missing_key",
        "system_memory_register_no_such_key", "system_memory_status", "system_memory_unregister_all",
        "system_memory_unregister_unknown", "input_shared_memory_unknown", "input_shared_memory_no_size",
        "output_shared_memory_unknown"]),
    "classification of outputs is not offered": ((501,), [
        "output_classification"]),
    "GET may be HEAD, and /v2/ is /v2": ((200,), [
        "head", "server_metadata_slash"]),
    "a space before a header's colon is refused, since proxies read it differently (RFC 9112)": ((400,), [
        "header_space_before_colon"]),
    "after Connection: close nothing more is answered": ((0,), [
        "pipelined_after_close 2"])}
ALLOWED = {name: statuses for statuses, names in REASONS.values() for name in names}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    method: str
    path: str
    headers: dict = dataclasses.field(default_factory=dict)
    body: bytes = b""
    # What is compared of a good answer: json, none, server, metadata, config, stats, index.
    view: str = "json"
    # Sent as it stands in place of method, path, headers and body.
    raw: bytes = b""
    # Answers to read from the one connection; their names are "name 1", "name 2", ... if there is more than one.
    answers: int = 1
    # No more bytes follow: the write side is closed after the request.
    cut: bool = False
    # Good answers where Triton gives none, as it hangs, closes or ends; 0 is to close without a word.
    wanted: tuple = (400, 0)

    def wire(self):
        if self.raw:
            return self.raw
        headers = {"Host": "localhost", **self.headers}
        if self.body and not {"content-length", "transfer-encoding"} & {key.lower() for key in headers}:
            headers["Content-Length"] = len(self.body)
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


def tensor(rows=1, **changes):
    """The one input of `double`, with fields replaced; a field that is ... is left out."""
    fields = {"name": "x", "shape": [rows, 16], "datatype": "FP32", "data": [i / 2 for i in range(rows * 16)],
              **changes}
    return {key: value for key, value in fields.items() if value is not ...}


def dump(value):
    return json.dumps(value, separators=(",", ":")).encode()


def infer(name, /, body=None, model="double", headers=None, **fields):
    """A request with the input of `double`, unless body (bytes, or an object to write) is given."""
    if body is None:
        body = {"inputs": [tensor()], **fields}
    body = body if isinstance(body, bytes) else dump(body)
    return Case(name, "POST", f"/v2/models/{model}/infer", headers or {}, body)


def input_(name, /, **changes):
    return infer(name, {"inputs": [tensor(**changes)]})


def binary(name, header, blob, model="double", length=None, headers=None):
    """A body of JSON and the tensors' bytes after it. length None: the true length of the JSON."""
    text = header if isinstance(header, bytes) else dump(header)
    length = {"Inference-Header-Content-Length": len(text) if length is None else length} if length is not ... else {}
    headers = {"Content-Type": "application/octet-stream", **length, **(headers or {})}
    return Case(name, "POST", f"/v2/models/{model}/infer", headers, text + blob)


FLOATS = struct.pack("<16f", *(i / 2 for i in range(16)))
BINARY_OUT = {"parameters": {"binary_data_output": True}}
HALVES = ("f16", "bf16")  # not in JSON
# Two elements of each datatype, at the ends of its range where JSON can say so.
VALUES = {"b": [True, False], "u8": [0, 255], "u16": [0, 65535], "u32": [0, 2**32 - 1], "u64": [0, 2**64 - 1],
          "i8": [-128, 127], "i16": [-2**15, 2**15 - 1], "i32": [-2**31, 2**31 - 1], "i64": [-2**63, 2**63 - 1],
          "f32": [0.1, -3.5e38 / 2], "f64": [0.1, 1e308]}
BYTES = {"b": b"\1\0", "u8": b"\0\xff", "u16": b"\0\0\xff\xff", "u32": b"\0" * 4 + b"\xff" * 4,
         "u64": b"\0" * 8 + b"\xff" * 8, "i8": b"\x80\x7f", "i16": b"\0\x80\xff\x7f",
         "i32": struct.pack("<2i", -2**31, 7),
         "i64": struct.pack("<2q", -2**63, 7), "f16": struct.pack("<2e", 0.5, -65504), "bf16": b"\x80\x3f\x49\xc0",
         "f32": struct.pack("<2f", 0.1, 1e-40), "f64": struct.pack("<2d", 0.1, 5e-324)}


def types(name, /, outputs=None, blobs=HALVES, binary_out=HALVES, **changes):
    """A request to `types`, in JSON but for the tensors in blobs; changes: the fields to replace in a tensor."""
    inputs, tail = [], b""
    for key, datatype in TYPES.items():
        fields = {"name": key, "shape": [1, 2], "datatype": datatype}
        if key in blobs:
            fields["parameters"] = {"binary_data_size": len(BYTES[key])}
            tail += BYTES[key]
        else:
            fields["data"] = VALUES.get(key, [1.5, -2])
        inputs.append({**fields, **changes.get(key, {})})
    body = {"inputs": inputs}
    if outputs is not None:
        body["outputs"] = [{"name": "out_" + key, "parameters": {"binary_data": key in binary_out}} for key in outputs]
    else:
        body.update(BINARY_OUT)
    return binary(name, body, tail, "types")


def text(name, data, shape=None, **fields):
    shape = [len(data)] if shape is None else shape
    return infer(name, {"inputs": [{"name": "text", "shape": shape, "datatype": "BYTES", "data": data}], **fields},
                 "words")


def text_binary(name, blob, count, size=None, **fields):
    size = len(blob) if size is None else size
    return binary(name, {"inputs": [{"name": "text", "shape": [count], "datatype": "BYTES",
                                     "parameters": {"binary_data_size": size}}], **fields}, blob, "words")


def prefixed(*strings):
    return b"".join(struct.pack("<I", len(string)) + string for string in strings)


def chunk(*pieces):
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def about_server():
    def get(name, path, view="json"):
        return Case(name, "GET", path, view=view)

    def post(name, path, body=b"", view="json"):
        return Case(name, "POST", path, {"Content-Length": len(body)}, body, view)

    return [
        get("live", "/v2/health/live", "none"), get("ready", "/v2/health/ready", "none"),
        get("server_metadata", "/v2", "server"), get("server_metadata_slash", "/v2/", "server"),
        get("server_metadata_query", "/v2?a=b", "server"),
        get("model_ready", "/v2/models/double/ready", "none"),
        get("model_ready_version", "/v2/models/double/versions/1/ready", "none"),
        get("model_ready_unknown", "/v2/models/nobody/ready"),
        get("model_ready_unknown_version", "/v2/models/double/versions/7/ready"),
        get("metadata", "/v2/models/double", "metadata"), get("metadata_slash", "/v2/models/double/", "metadata"),
        get("metadata_version", "/v2/models/double/versions/1", "metadata"),
        get("metadata_types", "/v2/models/types", "metadata"), get("metadata_words", "/v2/models/words", "metadata"),
        get("metadata_unknown", "/v2/models/nobody"), get("metadata_unknown_version", "/v2/models/double/versions/7"),
        get("metadata_version_text", "/v2/models/double/versions/one"),
        get("metadata_version_zero", "/v2/models/double/versions/0"),
        get("metadata_version_negative", "/v2/models/double/versions/-1"),
        get("metadata_version_huge", "/v2/models/double/versions/99999999999999999999"),
        get("metadata_percent_name", "/v2/models/d%6Fuble", "metadata"),
        get("metadata_percent_slash", "/v2/models/double%2Fready"), get("metadata_percent_bad", "/v2/models/d%zzuble"),
        get("metadata_percent_nul", "/v2/models/double%00"), get("metadata_percent_utf8", "/v2/models/d%C3%B6ppel"),
        get("config", "/v2/models/double/config", "config"), get("config_words", "/v2/models/words/config", "config"),
        get("config_types", "/v2/models/types/config", "config"), get("config_unknown", "/v2/models/nobody/config"),
        get("config_unknown_version", "/v2/models/double/versions/7/config"),
        get("stats", "/v2/models/double/stats", "stats"), get("stats_all", "/v2/models/stats", "stats"),
        get("stats_version", "/v2/models/double/versions/1/stats", "stats"),
        get("stats_unknown", "/v2/models/nobody/stats"),
        get("stats_unknown_version", "/v2/models/double/versions/7/stats"),
        post("index", "/v2/repository/index", b"{}", "index"),
        post("index_empty_body", "/v2/repository/index", view="index"),
        post("index_ready", "/v2/repository/index", b'{"ready":true}', "index"),
        post("index_ready_text", "/v2/repository/index", b'{"ready":"yes"}'),
        post("index_broken_json", "/v2/repository/index", b'{"ready":'),
        post("index_array", "/v2/repository/index", b"[]"),
        get("index_wrong_verb", "/v2/repository/index"),
        post("load_unknown", "/v2/repository/models/nobody/load"),
        post("load_broken_json", "/v2/repository/models/double/load", b"{"),
        post("unload_unknown", "/v2/repository/models/nobody/unload"),
        post("repository_unknown_verb", "/v2/repository/models/double/bless"),
        get("load_wrong_verb", "/v2/repository/models/double/load"),
        get("system_memory_status", "/v2/systemsharedmemory/status"),
        get("system_memory_status_unknown", "/v2/systemsharedmemory/region/nobody/status"),
        post("system_memory_unregister_all", "/v2/systemsharedmemory/unregister"),
        post("system_memory_unregister_unknown", "/v2/systemsharedmemory/region/nobody/unregister"),
        post("system_memory_register_missing_key", "/v2/systemsharedmemory/region/r/register", b'{"byte_size":64}'),
        post("system_memory_register_no_such_key", "/v2/systemsharedmemory/region/r/register",
             b'{"key":"/yoke_no_such_key","offset":0,"byte_size":64}'),
        get("cuda_memory_status", "/v2/cudasharedmemory/status"),
        post("cuda_memory_unregister_all", "/v2/cudasharedmemory/unregister"),
        post("generate", "/v2/models/double/generate", dump({"x": [0.5] * 16})),
        post("generate_words", "/v2/models/words/generate", b'{"text":"one"}'),
        post("generate_cannot", "/v2/models/types/generate", b'{"b":[true,false]}'),
        post("generate_unknown", "/v2/models/nobody/generate", b"{}"),
        post("generate_broken_json", "/v2/models/double/generate", b"{"),
        post("generate_stream_cannot", "/v2/models/types/generate_stream", b'{"b":[true,false]}'),
        get("generate_wrong_verb", "/v2/models/double/generate"),
        get("root", "/"), get("version_one", "/v1/models/double"), get("models", "/v2/models"),
        get("unknown_path", "/v2/nothing"), get("unknown_below_model", "/v2/models/double/nothing"),
        get("double_slash", "/v2//models/double"), get("dot_segments", "/v2/models/../models/double"),
        get("infer_wrong_verb", "/v2/models/double/infer"), post("metadata_wrong_verb", "/v2/models/double", b"{}"),
        post("live_wrong_verb", "/v2/health/live"), post("stats_wrong_verb", "/v2/models/double/stats", b"{}"),
        Case("delete", "DELETE", "/v2/models/double"),
        Case("put_infer", "PUT", "/v2/models/double/infer", {}, dump({"inputs": [tensor()]})),
        Case("verb_nobody_knows", "BREW", "/v2"), Case("verb_lower_case", "get", "/v2", wanted=(405, 501, 400, 0)),
        Case("head", "HEAD", "/v2/health/live", view="none"), Case("options", "OPTIONS", "/v2"),
    ]


def good_infer():
    many = {"inputs": [tensor(8)]}
    return [
        infer("flat"), infer("nested", {"inputs": [tensor(2, data=[[0.5] * 16, [1.5] * 16])]}),
        input_("nested_other_way", data=[[1.0] * 8, [2.0] * 8]), infer("batch_maximum", many),
        input_("whole_numbers", data=list(range(16))), input_("denormal", data=[1e-40] * 16),
        input_("underflow", data=[1e-60] * 16), input_("minus_zero", data=[-0.0] * 16),
        input_("digits", data=[0.1, 1 / 3, 16777217, 123456.789, 3e38 / 2, 1e-7] + [0.7] * 10),
        infer("id", id="row 17"), infer("id_empty", id=""), infer("id_unicode", id="\u00e4\u65e5\U0001f600\"\\\n"),
        infer("id_nul", id="a\0b"),
        infer("parameters", parameters={"s": "text", "i": -3, "u": 2**63, "d": 0.5, "b": True}),
        infer("parameters_empty", parameters={}), infer("unknown_field", colour="red"),
        infer("output_requested", outputs=[{"name": "y"}]), infer("outputs_empty", outputs=[]),
        infer("output_unknown_parameter", outputs=[{"name": "y", "parameters": {"colour": "red"}}]),
        input_("input_unknown_parameter", parameters={"colour": "red"}), input_("input_unknown_field", colour="red"),
        infer("version_in_path", model="double/versions/1"), infer("percent_name", model="do%75ble"),
        infer("priority", parameters={"priority": 1}), infer("timeout", parameters={"timeout": 5000000}),
        infer("key_twice", b'{"id":"a","id":"b",' + dump({"inputs": [tensor()]})[1:]),
        infer("spaces", b" \r\n\t" + json.dumps({"inputs": [tensor()]}, indent=2).encode() + b"\n \n"),
        infer("escaped_names", dump({"inputs": [tensor()]}).replace(b'"name":"x"', b'"n\\u0061me":"\\u0078"')),
        infer("content_type_text", headers={"Content-Type": "text/plain"}),
        infer("content_type_json", headers={"Content-Type": "application/json; charset=utf-8"}),
        infer("works", {"inputs": [tensor(shape=[1, 4], data=[1, 2, 3, 4])]}, "fails"),
    ]


def bad_infer():
    one = dump({"inputs": [tensor()]})
    return [
        infer("unknown_model", model="nobody"), infer("unknown_version", model="double/versions/7"),
        infer("output_unknown", outputs=[{"name": "z"}]), infer("output_twice", outputs=[{"name": "y"}, {"name": "y"}]),
        infer("output_without_name", outputs=[{}]), infer("output_name_number", outputs=[{"name": 3}]),
        infer("output_not_object", outputs=["y"]), infer("outputs_object", outputs={"name": "y"}),
        infer("outputs_null", outputs=None),
        infer("output_parameters_array", outputs=[{"name": "y", "parameters": []}]),
        infer("output_binary_text", outputs=[{"name": "y", "parameters": {"binary_data": "yes"}}]),
        infer("output_shared_memory_unknown", outputs=[{"name": "y", "parameters": {
            "shared_memory_region": "nobody", "shared_memory_byte_size": 64}}]),
        infer("output_classification", outputs=[{"name": "y", "parameters": {"classification": 2}}]),
        infer("inputs_missing", {}), infer("inputs_empty", {"inputs": []}), infer("inputs_null", {"inputs": None}),
        infer("inputs_object", {"inputs": tensor()}), infer("inputs_text", {"inputs": "x"}),
        infer("input_not_object", {"inputs": ["x"]}), infer("input_null", {"inputs": [None]}),
        infer("input_extra", {"inputs": [tensor(), tensor(name="z")]}),
        infer("input_twice", {"inputs": [tensor()] * 2}),
        input_("input_unknown", name="z"), input_("name_missing", name=...), input_("name_empty", name=""),
        input_("name_number", name=3), input_("name_null", name=None), input_("name_upper_case", name="X"),
        input_("shape_missing", shape=...), input_("shape_empty", shape=[], data=[1]), input_("shape_null", shape=None),
        input_("shape_text", shape="1,16"), input_("shape_number", shape=16),
        input_("shape_of_text", shape=["1", "16"]),
        input_("shape_of_floats", shape=[1.0, 16.0]), input_("shape_of_fractions", shape=[1.5, 16]),
        input_("shape_of_bools", shape=[True, 16]), input_("shape_of_nulls", shape=[None, 16]),
        input_("rank_one", shape=[16]), input_("rank_three", shape=[1, 16, 1]),
        input_("width_short", shape=[1, 15], data=[1] * 15),
        input_("width_long", shape=[1, 17], data=[1] * 17), input_("dim_negative", shape=[-1, 16]),
        input_("dims_negative", shape=[-1, -16]), input_("dim_huge", shape=[2**63, 16]),
        input_("dim_too_huge", shape=[2**64, 16]),
        input_("dims_overflow", shape=[2**60, 16]), input_("dims_overflow_to_zero", shape=[2**62, 16], data=[]),
        input_("batch_zero", shape=[0, 16], data=[]), infer("batch_over_maximum", {"inputs": [tensor(9)]}),
        input_("datatype_missing", datatype=...), input_("datatype_unknown", datatype="FP31"),
        input_("datatype_empty", datatype=""), input_("datatype_lower_case", datatype="fp32"),
        input_("datatype_number", datatype=32), input_("datatype_null", datatype=None),
        input_("datatype_int32", datatype="INT32", data=[1] * 16), input_("datatype_fp64", datatype="FP64"),
        input_("datatype_bytes", datatype="BYTES", data=["a"] * 16),
        input_("datatype_config_style", datatype="TYPE_FP32"),
        input_("data_missing", data=...), input_("data_null", data=None), input_("data_text", data="1,2"),
        input_("data_number", data=1), input_("data_object", data={"0": 1}), input_("data_empty", data=[]),
        input_("data_too_few", data=[1.0] * 15), input_("data_too_many", data=[1.0] * 17),
        input_("data_far_too_many", data=[1.0] * 5000), input_("data_of_text", data=["1"] * 16),
        input_("data_of_bools", data=[True] * 16), input_("data_of_nulls", data=[None] * 16),
        input_("data_of_objects", data=[{}] * 16), input_("data_ragged", data=[[1.0] * 10, [1.0] * 6]),
        input_("data_too_deep", data=[[[[1.0] * 16]]]), input_("data_mixed_depth", data=[1.0, [1.0] * 15]),
        input_("data_over_range", data=[1e39] * 16), input_("data_nan", data=[float("nan")] * 16),
        input_("data_infinity", data=[float("inf")] * 16), input_("data_minus_infinity", data=[float("-inf")] * 16),
        infer("data_over_double", one.replace(b"0.5", b"1e400")), infer("data_plus_sign", one.replace(b"0.5", b"+0.5")),
        infer("data_leading_zero", one.replace(b"0.5", b"00.5")),
        infer("data_no_leading_zero", one.replace(b"0.5", b".5")),
        infer("data_hexadecimal", one.replace(b"0.5", b"0x5")),
        infer("data_trailing_comma", one.replace(b"7.5]", b"7.5,]")),
        infer("data_nested_a_thousand", one.replace(b"0.5", b"[" * 1000 + b"0.5" + b"]" * 1000)),
        infer("data_nested_endless", one.replace(b"0.5", b"[" * 200000)),
        infer("parameters_nested_endless", b'{"parameters":' + b'{"a":' * 100000),
        infer("id_number", id=17), infer("id_null", id=None), infer("id_object", id={}),
        infer("parameters_array", parameters=[1]), infer("parameters_text", parameters="a"),
        infer("parameters_null", parameters=None),
        infer("parameter_null", parameters={"a": None}), infer("parameter_object", parameters={"a": {}}),
        infer("parameter_array", parameters={"a": [1]}), infer("parameter_reserved", parameters={"triton_a": 1}),
        infer("parameter_sequence", parameters={"sequence_id": 5, "sequence_start": True}),
        infer("parameter_sequence_start_text", parameters={"sequence_start": "yes"}),
        infer("parameter_priority_text", parameters={"priority": "high"}),
        infer("parameter_priority_negative", parameters={"priority": -1}),
        infer("parameter_timeout_negative", parameters={"timeout": -1}),
        infer("parameter_binary_output_text", parameters={"binary_data_output": "yes"}),
        input_("input_parameters_array", parameters=[]),
        input_("input_shared_memory_unknown", data=...,
               parameters={"shared_memory_region": "nobody", "shared_memory_byte_size": 64}),
        input_("input_shared_memory_no_size", data=..., parameters={"shared_memory_region": "nobody"}),
        infer("body_empty", b""), infer("body_spaces", b"   "), infer("body_text", b"hello"),
        infer("body_array", b"[]"),
        infer("body_string", b'"inputs"'), infer("body_number", b"1"), infer("body_null", b"null"),
        infer("body_truncated", one[:-40]), infer("body_without_last_brace", one[:-1]),
        infer("body_and_more", one + b"}"),
        infer("body_twice", one + one), infer("body_comment", b"/* a */" + one),
        infer("body_byte_order_mark", b"\xef\xbb\xbf" + one),
        infer("body_utf16", one.decode().encode("utf-16")), infer("body_nul", one + b"\0"),
        infer("body_zeros", b"\0" * 64),
        infer("body_not_utf8", b'{"id":"\xff\xfe",' + one[1:]), infer("body_single_quotes", one.replace(b'"', b"'")),
        infer("raises", {"inputs": [tensor(shape=[1, 4], data=[-1, 2, 3, 4])]}, "fails"),
    ]


def binary_cases():
    def bare(size=64, **changes):
        return {"inputs": [tensor(data=..., parameters={"binary_data_size": size}, **changes)]}

    def out(value):
        return {"outputs": [{"name": "y", "parameters": {"binary_data": value}}]}

    def zero(name, blob, model="double"):
        return binary(name, b"", blob, model, 0)

    plain = {"inputs": [tensor()]}
    return [
        binary("binary_in", bare(), FLOATS), binary("binary_in_and_out", {**bare(), **BINARY_OUT}, FLOATS),
        binary("binary_in_no_content_type", bare(), FLOATS, headers={"Content-Type": "application/json"}),
        infer("binary_out", {**plain, **BINARY_OUT}), infer("binary_out_by_output", {**plain, **out(True)}),
        infer("binary_out_overridden", {**plain, **BINARY_OUT, **out(False)}),
        infer("binary_out_false", {**plain, "parameters": {"binary_data_output": False}, **out(True)}),
        infer("binary_out_unset_output", {**plain, **BINARY_OUT, "outputs": [{"name": "y"}]}),
        binary("binary_header_whole_body", plain, b""), binary("binary_two_rows", {"inputs": [tensor(
            2, data=..., parameters={"binary_data_size": 128})]}, FLOATS * 2),
        binary("binary_not_a_number", bare(),
               struct.pack("<16f", *[float("nan"), float("inf"), float("-inf"), -0.0] * 4)),
        binary("binary_not_a_number_both_ways", {**bare(), **BINARY_OUT},
               struct.pack("<16f", *[float("nan"), float("inf"), float("-inf"), -0.0] * 4)),
        binary("binary_body_short", bare(), FLOATS[:-4]), binary("binary_body_missing", bare(), b""),
        binary("binary_body_long", bare(), FLOATS + b"\0\0\0\0"),
        binary("binary_size_short", bare(60), FLOATS[:60]),
        binary("binary_size_long", bare(68), FLOATS + b"\0" * 4),
        binary("binary_size_of_other_batch", bare(128), FLOATS * 2),
        binary("binary_size_zero", bare(0), b""),
        binary("binary_size_negative", bare(-64), FLOATS),
        binary("binary_size_huge", bare(2**63), FLOATS),
        binary("binary_size_text", bare("64"), FLOATS),
        binary("binary_size_fraction", bare(64.5), FLOATS),
        binary("binary_size_and_data", {"inputs": [tensor(parameters={"binary_data_size": 64})]}, FLOATS),
        binary("binary_wrong_width", bare(shape=[1, 15]), FLOATS),
        binary("binary_wrong_datatype", bare(datatype="FP64"), FLOATS),
        binary("binary_batch_zero", bare(0, shape=[0, 16]), b""),
        binary("binary_header_missing", bare(), FLOATS, length=...),
        binary("binary_header_negative", bare(), FLOATS, length=-1),
        binary("binary_header_over_body", bare(), FLOATS, length=100000),
        binary("binary_header_text", bare(), FLOATS, length="ten"),
        binary("binary_header_empty", bare(), FLOATS, length=""),
        binary("binary_header_short", bare(), FLOATS, length=20),
        binary("binary_header_long", bare(), FLOATS, length=len(dump(bare())) + 1),
        binary("binary_header_number_and_text", bare(), FLOATS, length=f"{len(dump(bare()))}ten"),
        binary("binary_header_overflow", bare(), FLOATS, length=2**64 + len(dump(bare()))),
        binary("binary_header_spaces", bare(), FLOATS, length=f"  {len(dump(bare()))}  "),
        zero("raw", FLOATS), zero("raw_two_rows", FLOATS * 2), zero("raw_short", FLOATS[:-1]), zero("raw_empty", b""),
        zero("raw_to_many_inputs", b"\1" * 8, "types"), zero("raw_to_words", prefixed(b"one"), "words"),
        zero("raw_to_words_without_length", b"one", "words"), zero("raw_to_unknown_model", FLOATS, "nobody"),
    ]


def datatype_cases():
    return [
        types("types"), types("types_as_json", list(VALUES)),
        types("types_as_binary", blobs=tuple(TYPES)), types("types_from_binary", list(VALUES), blobs=tuple(TYPES)),
        types("types_one_output", ["i16"]), types("types_outputs_in_my_order", ["u8", "f32", "b"]),
        types("types_half_out", ["f16", "bf16"]),
        types("fp16_as_json", [], f16={"data": [1.5, 2], "parameters": {}}, blobs=("bf16",)),
        types("bf16_as_json", [], bf16={"data": [1.5, 2], "parameters": {}}, blobs=("f16",)),
        types("fp16_out_as_json", ["f16"], binary_out=()), types("bf16_out_as_json", ["bf16"], binary_out=()),
        types("int8_over", ["i8"], i8={"data": [128, 0]}), types("int8_under", ["i8"], i8={"data": [-129, 0]}),
        types("uint8_over", ["u8"], u8={"data": [256, 0]}), types("uint8_negative", ["u8"], u8={"data": [-1, 0]}),
        types("int16_over", ["i16"], i16={"data": [32768, 0]}), types("uint16_over", ["u16"], u16={"data": [65536, 0]}),
        types("int32_over", ["i32"], i32={"data": [2**31, 0]}), types("uint32_over", ["u32"], u32={"data": [2**32, 0]}),
        types("uint32_negative", ["u32"], u32={"data": [-1, 0]}),
        types("int64_over", ["i64"], i64={"data": [2**63, 0]}),
        types("int64_far_over", ["i64"], i64={"data": [2**70, 0]}),
        types("uint64_over", ["u64"], u64={"data": [2**64, 0]}),
        types("uint64_negative", ["u64"], u64={"data": [-1, 0]}),
        types("int32_fraction", ["i32"], i32={"data": [1.5, 0]}),
        types("int32_whole_float", ["i32"], i32={"data": [1.0, 0]}),
        types("int32_exponent", ["i32"], i32={"data": [1e2, 0]}), types("int32_text", ["i32"], i32={"data": ["1", 0]}),
        types("int32_bool", ["i32"], i32={"data": [True, False]}), types("bool_number", ["b"], b={"data": [1, 0]}),
        types("bool_two", ["b"], b={"data": [2, 0]}), types("bool_text", ["b"], b={"data": ["true", "false"]}),
        types("float64_over", ["f64"], f64={"data": [float("inf"), 0]}),
        types("float64_of_bool", ["f64"], f64={"data": [True, 0]}),
        types("rows_differ", i8={"shape": [2, 2], "data": [1, 2, 3, 4]}),
        types("input_missing_of_many", [], i8={"name": "i9"}),
        text("words", ["one", "two", ""]),
        text("words_unicode", ["\u00e4", "\u65e5\u672c", "\U0001f600", "\"\\/\b\f\n\r\t\u007f"]),
        text("words_nul", ["a\0b"]), text("words_none", []), text("words_numbers", [1, 2]), text("words_null", [None]),
        text("words_bool", [True]), text("words_nested", [["a"], ["b"]], [2]),
        text("words_rank_two", ["a", "b"], [2, 1]),
        text("words_too_few", ["a"], [2]), text("words_too_many", ["a", "b"], [1]),
        text("words_lone_surrogate", ["\ud800"]),
        text("words_binary_out", ["one", ""], **BINARY_OUT), text("words_long", ["a" * 100000], **BINARY_OUT),
        text_binary("words_binary", prefixed(b"one", b"", b"two"), 3),
        text_binary("words_binary_both_ways", prefixed(b"one", b"\xff\0"), 2, **BINARY_OUT),
        text_binary("words_binary_not_utf8_to_json", prefixed(b"\xff\xfe"), 1),
        text_binary("words_binary_none", b"", 0),
        text_binary("words_binary_short_prefix", b"\3\0", 1),
        text_binary("words_binary_length_over", b"\4\0\0\0one", 1),
        text_binary("words_binary_length_huge", b"\xff\xff\xff\xffone", 1),
        text_binary("words_binary_one_too_many", prefixed(b"one", b"two"), 1),
        text_binary("words_binary_one_missing", prefixed(b"one"), 2),
        text_binary("words_binary_bytes_after", prefixed(b"one") + b"\0\0", 1),
    ]


def coded_cases():
    one = dump({"inputs": [tensor()]})
    def encoded(name, body, coding, headers=()):
        return infer(name, body, headers={"Content-Encoding": coding, **dict(headers)})

    def accept(name, value, body=None):
        return infer(name, body, headers={"Accept-Encoding": value})

    header = dump({"inputs": [tensor(data=..., parameters={"binary_data_size": 64})], **BINARY_OUT})
    packed = gzip.compress(one, mtime=0)
    raw = zlib.compressobj(wbits=-15)
    return [
        encoded("gzip", packed, "gzip"), encoded("deflate", zlib.compress(one), "deflate"),
        encoded("deflate_without_zlib_header", raw.compress(one) + raw.flush(), "deflate"),
        encoded("gzip_binary", gzip.compress(header + FLOATS, mtime=0), "gzip",
                {"Inference-Header-Content-Length": len(header)}),
        encoded("gzip_broken", b"hello" + packed, "gzip"), encoded("gzip_truncated", packed[:-20], "gzip"),
        encoded("gzip_checksum", packed[:-8] + b"\0" * 8, "gzip"), encoded("gzip_and_more", packed + b"hello", "gzip"),
        encoded("gzip_of_nothing", gzip.compress(b"", mtime=0), "gzip"), encoded("gzip_empty", b"", "gzip"),
        encoded("gzip_two_members", gzip.compress(one[:50], mtime=0) + gzip.compress(one[50:], mtime=0), "gzip"),
        encoded("gzip_named_deflate", packed, "deflate"), encoded("deflate_named_gzip", zlib.compress(one), "gzip"),
        encoded("gzip_upper_case", packed, "GZIP"), encoded("x_gzip", packed, "x-gzip"),
        encoded("plain_named_gzip", one, "gzip"), encoded("identity", one, "identity"),
        encoded("coding_unknown", one, "br"),
        encoded("coding_empty", one, ""), encoded("codings_two", gzip.compress(packed, mtime=0), "gzip, gzip"),
        accept("accept_gzip", "gzip"), accept("accept_deflate", "deflate"), accept("accept_both", "gzip, deflate"),
        accept("accept_both_weighed", "gzip;q=0.2, deflate;q=0.8"), accept("accept_not_gzip", "gzip;q=0"),
        accept("accept_any", "*"), accept("accept_brotli", "br"), accept("accept_identity", "identity"),
        accept("accept_not_identity", "identity;q=0"), accept("accept_empty", ""), accept("accept_upper_case", "GZIP"),
        accept("accept_gzip_binary", "gzip", {"inputs": [tensor()], **BINARY_OUT}),
        accept("accept_gzip_error", "gzip", {"inputs": []}),
        Case("accept_gzip_metadata", "GET", "/v2/models/double", {"Accept-Encoding": "gzip"}, view="metadata"),
    ]


def transport_cases():
    one = dump({"inputs": [tensor()]})
    path = "/v2/models/double/infer"
    def post(name, headers, body, **more):
        return Case(name, "POST", path, headers, body, **more)

    good, bad = infer("", id="good").wire(), infer("", {"inputs": []}).wire()
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    chunks = {"Transfer-Encoding": "chunked"}
    return [
        post("expect_continue", {"Expect": "100-continue"}, one),
        post("expect_upper_case", {"Expect": "100-Continue"}, one),
        post("expect_nobody_knows", {"Expect": "200-ok"}, one),
        post("chunked", chunks, chunk(one)),
        post("chunked_small", chunks, chunk(*(one[i:i + 7] for i in range(0, len(one), 7)))),
        post("chunked_extension_and_trailer", chunks, b"%x;a=b\r\n%s\r\n0\r\nX-After: 1\r\n\r\n" % (len(one), one),
             wanted=(200,)),
        post("chunked_empty", chunks, b"0\r\n\r\n"),
        post("chunked_bad_size", chunks, b"zz\r\n" + one + b"\r\n0\r\n\r\n", cut=True),
        post("chunked_negative_size", chunks, b"-5\r\n" + one, cut=True),
        post("chunked_cut", chunks, b"%x\r\n%s" % (len(one), one[:20]), cut=True),
        post("chunked_upper_case", {"Transfer-Encoding": "Chunked"}, chunk(one)),
        post("transfer_coding_unknown", {"Transfer-Encoding": "pigeon"}, one, cut=True),
        post("chunked_with_length", {**chunks, "Content-Length": 5}, chunk(one)),
        post("length_over_body", {"Content-Length": len(one) + 100}, one, cut=True),
        post("length_negative", {"Content-Length": -5}, one, cut=True),
        post("length_text", {"Content-Length": "ten"}, one, cut=True),
        post("length_huge", {"Content-Length": 2**62}, one, cut=True, wanted=(413, 400, 0)),
        post("length_overflow", {"Content-Length": 2**64 + len(one)}, one, cut=True),
        post("length_zero", {"Content-Length": 0}, b""), post("length_missing", {}, b"", cut=True),
        Case("lengths_differ", "", "",
             raw=b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nContent-Length: 5\r\n\r\n%s"
             % (path.encode(), len(one), one), cut=True),
        Case("pipelined", "", "", raw=live + good + live, answers=3, view="none", wanted=(200,)),
        Case("pipelined_infer", "", "", raw=good + bad + good, answers=3),
        Case("pipelined_many", "", "", raw=live * 50, answers=50, view="none", wanted=(200,)),
        Case("pipelined_after_close", "", "", raw=good.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1) + live,
             answers=2),
        Case("version_1_0", "", "", raw=b"GET /v2/health/live HTTP/1.0\r\n\r\n", view="none"),
        Case("version_2_0", "", "", raw=b"GET /v2/health/live HTTP/2.0\r\nHost: a\r\n\r\n", view="none",
             wanted=(505, 400, 0)),
        Case("version_0_9", "", "", raw=b"GET /v2/health/live\r\n\r\n", view="none", cut=True),
        Case("host_missing", "", "", raw=b"GET /v2/health/live HTTP/1.1\r\n\r\n", view="none"),
        Case("absolute_target", "", "", raw=b"GET http://localhost/v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n",
             view="none"),
        Case("line_feeds_only", "", "", raw=b"GET /v2/health/live HTTP/1.1\nHost: a\n\n", view="none", cut=True,
             wanted=(200, 400, 0)),
        Case("not_http", "", "", raw=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", cut=True),
        Case("header_without_colon", "", "", raw=b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\ncolour\r\n\r\n", cut=True,
             view="none"),
        Case("header_space_before_colon", "GET", "/v2/health/live", {"Colour ": "red"}, cut=True, view="none"),
        Case("header_names_lower_case", "POST", path, {"content-type": "application/json", "content-length": len(one)},
             one),
        Case("header_long", "GET", "/v2/health/live", {"X-Long": "a" * 5000}, view="none"),
        Case("header_far_too_long", "GET", "/v2/health/live", {"X-Long": "a" * 200000}, view="none",
             wanted=(431, 400, 0)),
        Case("headers_many", "GET", "/v2/health/live", {f"X-{i}": "a" for i in range(90)}, view="none"),
        Case("path_long", "GET", "/v2/models/" + "a" * 5000),
        Case("path_far_too_long", "GET", "/v2/models/" + "a" * 200000, wanted=(414, 431, 400, 0)),
        Case("live_after_all", "GET", "/v2/health/live", view="none"),
    ]


CASES = (*about_server(), *good_infer(), *bad_infer(), *binary_cases(), *datatype_cases(), *coded_cases(),
         *transport_cases())
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases have one name"


class Shared:
    """Looks like a socket and lends one reader to every HTTPResponse, so that none loses the next one's bytes."""

    def __init__(self, reader):
        self.reader = reader

    def makefile(self, mode):
        return self

    def close(self):
        pass

    def __getattr__(self, name):
        return getattr(self.reader, name)


def read_answer(reader, method):
    response = http.client.HTTPResponse(Shared(reader), method=method)
    try:
        response.begin()
        data = response.read()
    except (http.client.HTTPException, ConnectionError):
        return {"status": 0, "body": "closed", "headers": {}}
    except OSError:  # also what a reader raises that has timed out before
        return {"status": 0, "body": "timeout", "headers": {}}
    headers = {name: response.headers[name] for name in HEADERS if response.headers[name] is not None}
    result = {"status": response.status, "headers": headers}
    if headers.get("content-encoding") in ("gzip", "deflate"):
        data = zlib.decompress(data, 47)  # either header
    length = headers.get("inference-header-content-length")
    if length is not None:
        data, tail = data[:int(length)], data[int(length):]
    try:
        result["body"] = json.loads(data)
    except ValueError:
        result["body"] = data.decode("utf-8", "backslashreplace")
    if length is not None:
        hand_out(result["body"], tail)
    return result


def hand_out(body, tail):
    """Puts each output's share of the binary part into it, as text; what nobody has asked for goes to the whole."""
    for output in body["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            piece, tail = tail[:size], tail[size:]
            output["binary"] = piece.hex() if size < 256 else f"{len(piece)} bytes, sum {zlib.crc32(piece)}"
    if tail:
        body["binary"] = tail.hex()


def run_case(host, port, case):
    """The answers to a case, one for each name."""
    names = [case.name] if case.answers == 1 else [f"{case.name} {i + 1}" for i in range(case.answers)]
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        try:
            connection.sendall(case.wire())
            if case.cut:
                connection.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass  # answered and closed before it has read all: the answer may be there
        with connection.makefile("rb") as reader:
            return {name: read_answer(reader, case.method) for name in names}


def run_cases(host, port):
    answers = {}
    for case in CASES:
        answers.update(run_case(host, port, case))
    return answers


def kinds(value):
    """A JSON value with every number, string and flag replaced by the name of its kind."""
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    if isinstance(value, list):
        return [kinds(value[0])] if value else []
    return type(value).__name__


def view_config(config):
    def ports(entries):
        return [{key: entry[key] for key in ("name", "data_type", "dims")} for entry in entries]

    return {"name": config["name"], "max_batch_size": config["max_batch_size"], "input": ports(config["input"]),
            "output": ports(config["output"])}


def view_stats(stats):
    """Names, and the kinds of the fields that counters have; what has been counted so far is each server's own."""
    own = ("response_stats", "batch_stats", "memory_usage")
    entries = [(entry["name"], entry["version"], kinds({key: entry[key] for key in entry if key not in own}))
               for entry in stats["model_stats"]]
    return sorted(entries, key=str)


VIEWS = {
    "json": lambda body: body, "none": lambda body: None, "server": kinds, "config": view_config, "stats": view_stats,
    "metadata": lambda body: {key: body.get(key) for key in ("name", "versions", "inputs", "outputs")},
    "index": lambda body: sorted((entry["name"], entry.get("state")) for entry in body),
}


def plain(value, datatype=None):
    """Comparable with ==: floats as the bytes of their type (in FP32 0.1 is 0.10000000149011612), outputs by name."""
    if isinstance(value, dict):
        return {key: {output["name"]: plain(output, output["datatype"]) for output in item} if key == "outputs"
                and datatype is None and all("data" in output or "binary" in output for output in item)
                else plain(item, value.get("datatype")) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item, datatype) for item in value]
    if isinstance(value, float) or datatype in ("FP32", "FP64") and isinstance(value, int):
        with contextlib.suppress(OverflowError):
            return struct.pack("<f" if datatype == "FP32" else "<d", value)
    return value


def difference(case, ours, oracle):
    """What differs, in words; None if nothing does."""
    if ours["body"] == "timeout":
        return f"no answer in {TIMEOUT_S} s"
    if oracle["status"] == 0 and ours["status"] in case.wanted:
        return None
    if ours["status"] != oracle["status"]:
        wanted = oracle["status"] or case.wanted
        return f"status {ours['status']}, not {wanted}: {json.dumps(ours['body'])[:160]}"
    if oracle["status"] != 200:
        has_error = isinstance(ours["body"], dict) and bool(ours["body"].get("error"))
        return "no error text" if oracle["status"] and case.method != "HEAD" and not has_error else None
    for part in ("content-type", "content-encoding"):
        if case.view == "json" and oracle["body"] and ours["headers"].get(part) != oracle["headers"].get(part):
            return f"{part} {ours['headers'].get(part)}, not {oracle['headers'].get(part)}"
    try:
        seen = VIEWS[case.view](ours["body"])
    except (AttributeError, KeyError, TypeError) as error:
        return f"not the shape of a {case.view}: {error!r} in {json.dumps(ours['body'])[:160]}"
    wanted = VIEWS[case.view](oracle["body"])
    if plain(seen) != plain(wanted):
        return f"body {json.dumps(seen)[:400]}, not {json.dumps(wanted)[:400]}"
    return None


def compare(ours, oracle, allowed):
    """A line for each difference that `allowed` does not explain, and for each line of it that is needless."""
    lines = []
    for name in sorted(ours.keys() | oracle.keys()):
        if name not in ours or name not in oracle:
            lines.append(f"{name}: answered by one of the two only; renew serve_answers.json")
            continue
        case = BY_NAME.get(name) or BY_NAME[name.rsplit(" ", 1)[0]]
        found = difference(case, ours[name], oracle[name])
        if found and name not in allowed:
            lines.append(f"{name}: {found}")
        if not found and name in allowed:
            lines.append(f"{name}: listed as different, but is not")
        if name in allowed and ours[name]["status"] not in allowed[name]:
            lines.append(f"{name}: status {ours[name]['status']}, where {allowed[name]} would be explained")
    return lines + [f"{name}: allowed to differ, but there is no such case" for name in allowed if name not in ours]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--show", metavar="NAME")
    arguments = parser.parse_args()
    host, port = arguments.address.rsplit(":", 1)
    oracle = json.loads(ANSWERS.read_text())
    if arguments.show:
        case = BY_NAME[arguments.show]
        print(case.wire().decode("latin-1")[:2000])
        for name, answer in run_case(host, int(port), case).items():
            print("ours  ", json.dumps(answer, sort_keys=True))
            print("oracle", json.dumps(oracle.get(name), sort_keys=True))
        return 0
    answers = run_cases(host, int(port))
    lines = compare(answers, oracle, ALLOWED)
    print(*lines, f"{len(CASES)} cases, {len(answers)} answers, {len(lines)} differences, {len(ALLOWED)} allowed",
          sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
