"""Compiles Triton kernels for Hopper on a machine without a GPU, instead of launching them.

    python -m tests.hopper_compiler       (not in Triton's interpreter)

prints a line per kernel of DLRM: its name, and the bytes of stack that it needs for
registers it does not have. The interpreter accepts programs that the compiler refuses.
"""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from trainmark.kernels import (
    adagrad_update,
    click_loss,
    copy_rows,
    cross_layers,
    fp8_codes,
    gather_interaction,
    gather_rows,
    interaction,
    pool_rows,
    relu_mlp,
    sparse_update,
    terabyte_rows,
)
from trainmark.kernels.sparse_update import Rule, SortedRows
from trainmark.kernels.table_formats import FORMATS, Tables, new_rows
from trainmark.workloads.dlrm import terabyte

HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
OPTIONS = ("num_warps", "num_stages")
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8",
    torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def compile_instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """What a launch would compile, with aligned pointers."""
    options = {key: named.pop(key) for key in OPTIONS if key in named}
    values = dict(zip(self.arg_names, args, strict=False)) | named
    signature: dict[str, Any] = {}
    constants, aligned = {}, dict[tuple[int, ...], list[list[Any]]]()
    for place, parameter in enumerate(self.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            aligned[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, tuple):
            signature[name] = tuple(TYPES[tensor.dtype] for tensor in value)
            aligned |= {(place, i): [["tt.divisibility", 16]] for i in range(len(value))}
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    source = ASTSource(self, signature, constants, aligned)
    compiled = triton.compile(source, target=HOPPER, options=options)
    print(self.fn.__name__, stack_bytes(compiled.asm["cubin"]), flush=True)


def stack_bytes(binary: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    return int(stack)


def compile_interactions(features: int, dim: int, dtype: torch.dtype, tables: Tables) -> None:
    B = 4096
    x, ids = torch.empty(B, dim, dtype=dtype), torch.empty(B, features, dtype=torch.int32)
    grad = torch.empty(B, interaction.output_width(features, dim), dtype=dtype)
    rows = gather_rows.gather_rows_triton(ids, tables, dtype)
    gather_interaction.forward_triton(x, ids, tables)
    gather_interaction.backward_triton(grad, x, ids, tables, rows, torch.empty(()))


def compile_gradients_at_rows(features: int, dim: int, dtype: torch.dtype) -> None:
    B = 4096
    x, ids = torch.empty(B, dim, dtype=dtype), torch.empty(B, features, dtype=torch.int64)
    grad = torch.empty(B, interaction.output_width(features, dim), dtype=dtype)
    received = Tables(new_rows(B * features, dim, dtype, "meta"))
    gather_interaction.backward_triton(
        grad, x, ids, received, torch.empty_like(received.first.codes), at_rows=True
    )


def compile_bags(dim: int, tables: Tables, dtype: torch.dtype) -> None:
    block = pool_rows.BagBlock(0, 1, 3, 3, 1000, 1, 27)
    bags = pool_rows.Bags([block], torch.device("meta"))
    out = torch.empty(27000, dim, dtype=dtype)
    pool_rows.pool_rows_triton(torch.empty(3000, dtype=torch.int32), bags, tables, out)
    pool_rows.rows_of_triton(torch.empty(3000, dtype=torch.int64), bags)


def compile_cross_layers(dtype: torch.dtype) -> None:
    x = torch.empty(4096, 3456, dtype=dtype)
    cross_layers.has_kernel = lambda x: True
    inputs, gradients = (
        fp8_codes.Codes(torch.empty_like(x, dtype=kind), torch.empty(()))
        for kind in (fp8_codes.CODES, fp8_codes.GRADIENTS)
    )
    cross_layers.crossed(x, x, x)
    cross_layers.crossed(x, x, x, inputs)
    for codes in (None, gradients):
        for layer in (0, 1):
            cross_layers.gradients_of_layer(layer, [x] * 3, x, [x] * 3, codes)


def compile_updates(
    dim: int, table_format: str, rule: Rule, state_dtype: torch.dtype = torch.float32
) -> None:
    count, num_rows = 65536, 1000
    rows = new_rows(num_rows, dim, FORMATS[table_format], "meta")
    shapes = {"sgd": None, "rowwise_adagrad": (num_rows,), "adagrad": (num_rows, dim)}
    shape = shapes[rule.name]
    batch = SortedRows(
        torch.empty(count, dtype=torch.int32),
        torch.empty(count).long(),
        of_bags=state_dtype != torch.float32,
    )
    sparse_update.update_rows_triton(
        rows,
        None if shape is None else torch.empty(shape, dtype=state_dtype),
        batch,
        torch.empty(count, dim, dtype=torch.bfloat16),
        rule,
        torch.empty(3),
        torch.empty((), dtype=torch.int32),
    )


def compile_copies(dim: int) -> None:
    table, listed = torch.empty(1000, dim), torch.empty(500, dim)
    for to_table in (False, True):
        copy_rows.copy_rows_triton(
            table, torch.empty(500, dtype=torch.int32), listed, to_table=to_table
        )


def compile_mlps(dtype: torch.dtype) -> None:
    gradient, weight = torch.empty(4096, 512, dtype=dtype), torch.empty(512, 1024, dtype=dtype)
    relu_mlp._masked_gemm(gradient, weight, torch.empty(4096, 1024, dtype=dtype))
    relu_mlp._masked_sums(gradient, gradient)
    relu_mlp.column_sums(gradient)


def compile_loss(dtype: torch.dtype) -> None:
    bias, labels, scale = torch.empty(1), torch.empty(4096), torch.empty(())
    x, weight = torch.empty(4096, 256, dtype=dtype), torch.empty(1, 256)
    click_loss.click_loss_triton(x, weight, bias, labels, scale)


def compile_fp8_layers() -> None:
    gradient, scale = torch.empty(4096, 512, dtype=torch.bfloat16), torch.empty(())
    fp8_codes._quantize(gradient, scale, fp8_codes.CODES)
    fp8_codes._quantize(gradient.float(), scale, fp8_codes.CODES)
    fp8_codes._quantize_rows(gradient, scale, gradient.to(fp8_codes.CODES))
    fp8_codes._quantize_masked(gradient, gradient, scale)
    fp8_codes._mask_codes(gradient.to(fp8_codes.GRADIENTS), gradient.to(fp8_codes.CODES), scale)


def compile_dense_update() -> None:
    weight, scalar = torch.empty(5000), torch.empty(())
    adagrad_update.update(weight, weight, weight, scalar, scalar, 1e-8)


def compile_terabyte() -> None:
    with torch.device("cpu"):
        tables = terabyte.on_device(terabyte.terabyte.THRESHOLD_15, torch.device("cpu"))
        rows = terabyte_rows.RowsOnDevice.empty(1000, tables)
    for levels in (rows.levels, None):
        terabyte_rows.make_rows(tables, 2**32, dataclasses.replace(rows, levels=levels))


def main() -> None:
    JITFunction.run = compile_instead
    torch.set_default_device("meta")
    for features, dim in ((26, 128), (64, 512), (1, 24), (26, 256)):
        fp32 = new_rows(1000, dim, torch.float32, "meta")
        int8 = new_rows(1000, dim, torch.int8, "meta")
        mixed = Tables(int8, fp32, torch.empty(features, dtype=torch.bool))
        for dtype in (torch.bfloat16, torch.float32):
            compile_interactions(features, dim, dtype, mixed)
            if dim != 256:  # 56 bytes of stack, with which it is no slower than any other launch
                compile_gradients_at_rows(features, dim, dtype)
    fp8 = Tables(new_rows(1000, 128, torch.float8_e4m3fn, "meta"))
    compile_interactions(26, 128, torch.float16, fp8)
    compile_gradients_at_rows(26, 128, torch.float16)
    for table_format in FORMATS:
        compile_updates(128, table_format, Rule("rowwise_adagrad"))
    compile_updates(128, "fp32", Rule("sgd"))
    compile_updates(128, "fp16", Rule("adagrad"))
    compile_updates(128, "bf16", Rule("adagrad"), torch.bfloat16)
    compile_updates(128, "int8", Rule("adagrad"), torch.bfloat16)
    bf16, small = (
        new_rows(1000, 128, torch.bfloat16, "meta"),
        new_rows(9, 128, torch.float32, "meta"),
    )
    both = torch.empty(26, dtype=torch.bool)
    compile_bags(128, Tables(bf16, small, both), torch.bfloat16)
    compile_bags(128, Tables(small, bf16, both), torch.bfloat16)
    compile_bags(128, Tables(small), torch.float32)
    compile_cross_layers(torch.bfloat16)
    compile_updates(512, "int8", Rule("sgd"))
    compile_updates(128, "fp32", Rule("sgd", weight_decay=0.1))
    for dtype in (torch.bfloat16, torch.float16):
        compile_mlps(dtype)
        compile_loss(dtype)
    compile_fp8_layers()
    compile_dense_update()
    for dim in (1, 24, 128):
        compile_copies(dim)
    compile_terabyte()


if __name__ == "__main__":
    main()
