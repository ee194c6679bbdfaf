#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes TorchScript models and models.toml, which serves them, into FOLDER.

double  y = 2x, rows of 16, at most 8 rows a request
types   one tensor for each datatype of the protocol but BYTES, each given back unchanged
numbers the same without FP16 and BF16, which neither JSON nor gRPC's typed contents can carry
words   strings, each with "!" after it; any bytes pass
fails   gives x back, but raises where a row starts with a negative value

serve_cases.py, serve_clients.py and serve_oracle.py read the tables below; only writing the models needs torch.
"""
import pathlib
import sys

# Name of the tensor in `types`, its datatype in the protocol. Each tensor is [-1, 2].
TYPES = {"b": "BOOL", "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64", "i8": "INT8", "i16": "INT16",
         "i32": "INT32", "i64": "INT64", "f16": "FP16", "bf16": "BF16", "f32": "FP32", "f64": "FP64"}
NUMBERS = {name: datatype for name, datatype in TYPES.items() if name not in ("f16", "bf16")}

CONFIG = """\
[serve]
http = "127.0.0.1:0"
grpc = "127.0.0.1:0"

[[model]]
name = "double"
path = "double.pt"
input = ["x:FP32[-1,16]"]
output = ["y:FP32[-1,16]"]
batch = 8

[[model]]
name = "types"
path = "types.pt"
input = [{types_in}]
output = [{types_out}]
batch = 8

[[model]]
name = "numbers"
path = "numbers.pt"
input = [{numbers_in}]
output = [{numbers_out}]
batch = 8

[[model]]
name = "words"
path = "words.pt"
input = ["text:BYTES[-1]"]
output = ["loud:BYTES[-1]"]

[[model]]
name = "fails"
path = "fails.pt"
input = ["x:FP32[-1,4]"]
output = ["y:FP32[-1,4]"]
batch = 8
"""


def write_models(folder):
    import torch
    from torch import Tensor

    class Double(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Types(torch.nn.Module):
        def forward(self, b: Tensor, u8: Tensor, u16: Tensor, u32: Tensor, u64: Tensor, i8: Tensor, i16: Tensor,
                    i32: Tensor, i64: Tensor, f16: Tensor, bf16: Tensor, f32: Tensor, f64: Tensor):
            return b, u8, u16, u32, u64, i8, i16, i32, i64, f16, bf16, f32, f64

    class Numbers(torch.nn.Module):
        def forward(self, b: Tensor, u8: Tensor, u16: Tensor, u32: Tensor, u64: Tensor, i8: Tensor, i16: Tensor,
                    i32: Tensor, i64: Tensor, f32: Tensor, f64: Tensor):
            return b, u8, u16, u32, u64, i8, i16, i32, i64, f32, f64

    class Words(torch.nn.Module):
        def forward(self, text: list[str]) -> list[str]:
            return [word + "!" for word in text]

    class Fails(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x[:, 0] < 0).any()):
                raise ValueError("a row starts with a negative value")
            return x

    for kind in (Double, Types, Numbers, Words, Fails):
        torch.jit.script(kind()).save(str(folder / f"{kind.__name__.lower()}.pt"))


def main():
    if len(sys.argv) != 2:
        print("usage: serve_models.py FOLDER", file=sys.stderr)
        return 2
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_models(folder)
    ports = lambda table, prefix="": ", ".join(f'"{prefix}{name}:{datatype}[-1,2]"'  # noqa: E731
                                               for name, datatype in table.items())
    (folder / "models.toml").write_text(CONFIG.format(
        types_in=ports(TYPES), types_out=ports(TYPES, "out_"),
        numbers_in=ports(NUMBERS), numbers_out=ports(NUMBERS, "out_")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
