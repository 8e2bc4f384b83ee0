"""ONNX models, node by node; their weights are written one at a time.

A protobuf file ends at 2 GB. The weights of a larger model lie in a file of their own, from which a
runtime maps them into memory (ONNX's "external data").
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, save_model
from torch import Tensor

from trainmark import __version__

Load = Callable[[list[str]], dict[str, Tensor]]
OPSET, IR_VERSION = 17, 8  # of 2022: no operator here needs a newer one, and old runtimes read it
INLINE_BYTES = 2**28
"""Weights up to so many, together, are stored in the model's own file."""
ALIGNMENT = 2**16  # where systems can begin to map a file: at pages, Windows at 64 KiB

_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int8: TensorProto.INT8,
    torch.float8_e4m3fn: TensorProto.UINT8,  # its bytes: ONNX has fp8, and no Gather that takes it
}


class Graph:
    """A model as it is put together; every method gives the name of what it added."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[tuple[Any, ...], TensorProto] = {}
        """Small tensors by type, shape and content."""
        self.weights: dict[str, Tensor] = {}
        """Weights by name, on the meta device."""

    def add(self, operator: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """A node with one output."""
        name = output or f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, values: Tensor | Sequence[int]) -> str:
        """A small tensor that is part of the method; equal ones are stored once."""
        tensor = torch.as_tensor(values)
        key = (tensor.dtype, tensor.shape, tensor.numpy().tobytes())
        if key not in self.constants:
            name = f"constant_{len(self.constants)}"
            self.constants[key] = numpy_helper.from_array(tensor.numpy(), name)
        return self.constants[key].name

    def weight(self, name: str, tensor: Tensor) -> str:
        """A tensor on the meta device, whose values are asked for by name when it is written."""
        self.weights[name] = tensor
        return name


def write_model(
    path: Path,
    graph: Graph,
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    load: Load,
    told: Mapping[str, Any],
) -> None:
    """Write a model, and `path`.data beside it if its weights are many.

    Args:
        load: the weights of some names; their shapes may differ from the graph's, not their order.
        told: its metadata, by name; runtimes give it as JSON.
    """
    if sum(tensor.nbytes for tensor in graph.weights.values()) <= INLINE_BYTES:
        weights = list(_inline(graph.weights, load))
    else:
        weights = list(_beside(path.with_name(f"{path.name}.data"), graph.weights, load))
    made = helper.make_graph(
        graph.nodes, path.stem, inputs, outputs, [*graph.constants.values(), *weights]
    )
    model = helper.make_model(
        made,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="trainmark",
        producer_version=__version__,
    )
    helper.set_model_props(model, {name: json.dumps(value) for name, value in told.items()})
    save_model(model, path)


def _inline(weights: Mapping[str, Tensor], load: Load) -> Iterator[TensorProto]:
    for name, tensor in weights.items():
        yield _proto(name, tensor, raw_data=_bytes_of(load([name])[name]).tobytes())


def _beside(path: Path, weights: Mapping[str, Tensor], load: Load) -> Iterator[TensorProto]:
    with open(path, "wb") as file:
        for name, tensor in weights.items():
            if not tensor.nbytes:  # nothing can be mapped
                yield _proto(name, tensor, raw_data=b"")
                continue
            offset = file.seek(-(-file.tell() // ALIGNMENT) * ALIGNMENT)
            proto = _proto(name, tensor, data_location=TensorProto.EXTERNAL)
            place = {"location": path.name, "offset": offset, "length": tensor.nbytes}
            for key, value in place.items():
                proto.external_data.add(key=key, value=str(value))
            file.write(_bytes_of(load([name])[name]).data)
            yield proto


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.view(-1).view(torch.uint8).numpy()


def _proto(name: str, tensor: Tensor, **fields: Any) -> TensorProto:
    return TensorProto(name=name, dims=tensor.shape, data_type=_TYPES[tensor.dtype], **fields)
