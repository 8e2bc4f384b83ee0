"""Tensors of the KServe v2 protocol, and its requests over HTTP.

A request is JSON; with the binary extension, tensors follow it in its body, and the header
`Inference-Header-Content-Length` says where they begin. Answers have the same form.

    https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from http import HTTPStatus
from itertools import chain
from typing import Any

import numpy as np
import pydantic_core
from numpy.typing import NDArray

from trainmark.errors import InputError
from trainmark.inference.server.batching import Loaded, Question
from trainmark.inference.server.limits import RefusalError
from trainmark.inference.server.own_form import parse
from trainmark.scoring import TensorSpec

TYPES: Mapping[str, Any] = {
    "BOOL": np.dtype("?"),
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BYTES": np.dtype(object),
}
LENGTH_BYTES = 4
"""Before each element of a binary tensor of BYTES."""


# --- one tensor


def of_bytes(name: str, datatype: str, shape: Sequence[int], raw: memoryview) -> NDArray[Any]:
    """A tensor of its binary form."""
    kind, count = _type_of(name, datatype), _count(name, shape)
    if datatype == "BYTES":
        elements = list(_elements(name, bytes(raw)))
        found = np.empty(len(elements), object)
        found[:] = elements
    elif len(raw) != count * kind.itemsize:
        raise InputError(
            f"{name!r} has {len(raw):,} bytes, expected {count * kind.itemsize:,} for {datatype} "
            f"of shape {list(shape)}."
        )
    else:
        found = np.frombuffer(bytearray(raw), kind)  # writable, as PyTorch likes arrays to be
    return _shaped(name, found, shape, count)


def of_lists(name: str, datatype: str, shape: Sequence[int], data: Any) -> NDArray[Any]:
    """A tensor of JSON, whose lists may be nested or flat."""
    kind, count = _type_of(name, datatype), _count(name, shape)
    if not isinstance(data, list):
        raise InputError(f"{name!r} has no 'data', expected a list of {count:,} elements.")
    if datatype == "BYTES":
        return _shaped(name, _texts(name, data), shape, count)
    found = _numbers(data)
    allowed = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}[kind.kind]
    if found.size and found.dtype.kind not in allowed:
        raise InputError(f"{name!r} has values that are not {datatype}, or unequal lists.")
    return _shaped(name, _cast(name, found, kind, datatype), shape, count)


def to_bytes(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _type_of(name: str, datatype: Any) -> Any:
    if not isinstance(datatype, str) or datatype not in TYPES:
        raise InputError(
            f"{name!r} has the datatype {datatype!r:.40}, expected one of {', '.join(TYPES)}."
        )
    return TYPES[datatype]


def _count(name: str, shape: Any) -> int:
    sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else [None]
    if not all(type(size) is int and 0 <= size < 2**31 for size in sizes):
        raise InputError(f"{name!r} has the shape {shape!r:.60}, expected a list of sizes.")
    return math.prod(sizes)


def _shaped(name: str, found: NDArray[Any], shape: Sequence[int], count: int) -> NDArray[Any]:
    if found.size != count:
        raise InputError(
            f"{name!r} has {found.size:,} elements, expected {count:,} for shape {list(shape)}."
        )
    return found.reshape(shape)


def _elements(name: str, raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        begin = at + LENGTH_BYTES
        at = begin + int.from_bytes(raw[at:begin], "little")
        if at > len(raw) or begin > len(raw):
            raise InputError(f"{name!r} ends within an element: 4 bytes of length, then text.")
        yield raw[begin:at]


def _cast(name: str, found: NDArray[Any], kind: Any, datatype: str) -> NDArray[Any]:
    """In another type of the same kind; refuses integers that would become other ones."""
    if found.dtype == kind:
        return found
    if found.size and kind.kind in "iu":
        bounds = np.iinfo(kind)
        for value in (int(found.min()), int(found.max())):
            if not bounds.min <= value <= bounds.max:
                raise InputError(
                    f"{name!r} has the value {value}, expected {datatype}, from {bounds.min} to "
                    f"{bounds.max}."
                )
    with np.errstate(over="ignore"):
        return found.astype(kind, copy=False)


def _numbers(data: list[Any]) -> NDArray[Any]:
    """An array of numbers; of the type object if they are none, or lists are unequal."""
    # numpy would give every element the room of the longest text.
    if set(map(type, _flat(data))) <= {int, float, bool}:
        try:
            return np.array(data).reshape(-1)
        except ValueError:
            pass
    return np.array(None)


def _flat(data: list[Any]) -> list[Any]:
    while data and all(isinstance(part, list) for part in data):
        data = list(chain.from_iterable(data))
    return data


def _texts(name: str, data: list[Any]) -> NDArray[Any]:
    data = _flat(data)
    if not all(isinstance(element, str) for element in data):
        raise InputError(f"{name!r} has values that are not texts, which BYTES are in JSON.")
    found = np.empty(len(data), object)
    found[:] = [element.encode() for element in data]
    return found


# --- the tensors of a request


def checked(
    tensors: Iterable[tuple[str, NDArray[Any]]], specs: Sequence[TensorSpec]
) -> dict[str, NDArray[Any]]:
    """Tensors in the types that a model takes, by name; refuses others than it takes."""
    given, wanted = list(tensors), {spec.name: spec for spec in specs}
    names = [name for name, _ in given]
    if sorted(names) != sorted(wanted):
        received = ", ".join(map(repr, names)) or "none"
        raise InputError(f"The request has the inputs {received}; expected {', '.join(wanted)}.")
    found = {name: _fitting(tensor, wanted[name]) for name, tensor in given}
    if len({len(tensor) for tensor in found.values()}) > 1:
        raise InputError("The inputs have different numbers of rows.")
    return found


def _fitting(tensor: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    shape = tensor.shape
    fits = len(shape) == len(spec.shape) and shape[1:] == spec.shape[1:]
    kind = TYPES[spec.datatype]
    # Narrower types of the same kind may come; BYTES are nothing else.
    alike = (tensor.dtype.kind == "O") == (kind.kind == "O") and tensor.dtype.kind != "b"
    if not fits or not alike or not np.can_cast(tensor.dtype, kind, "same_kind"):
        raise InputError(
            f"{spec.name!r} is {_name_of(tensor)} of shape {list(shape)}, expected {spec.datatype} "
            f"of shape {list(spec.shape)}, where -1 is any number of rows."
        )
    return _cast(spec.name, tensor, kind, spec.datatype)


def _name_of(tensor: NDArray[Any]) -> str:
    return next(name for name, kind in TYPES.items() if kind == tensor.dtype)


def check_version(wanted: str, loaded: Loaded, model: str) -> None:
    """Refuse a request for another version than the one that is served."""
    if wanted and wanted != loaded.version:
        raise RefusalError(
            HTTPStatus.NOT_FOUND,
            f"{model} has version {loaded.version}, not {wanted:.40}. Ask without a version for "
            "the one that is served.",
        )


def check_outputs(names: Iterable[Any], loaded: Loaded) -> None:
    """Refuse a request for another output than the model's own."""
    expected = loaded.scorer.output.name
    for name in names:
        if name != expected:
            raise InputError(f"There is no output {name!r:.60}; expected {expected!r}.")


# --- over HTTP


class InferRequest:
    """A request to `/v2/models/NAME/infer`.

    Args:
        model, version: that its path names; any version if that is empty.
        body: JSON and binary tensors.
        json_bytes: length of the JSON; None: of all of it.
    """

    def __init__(self, model: str, version: str, body: bytes, json_bytes: int | None) -> None:
        self._model, self._version, self._body = model, version, body
        self._json_bytes = len(body) if json_bytes is None else json_bytes
        self._header: dict[str, Any] = {}

    def question(self, has_left: Callable[[], bool]) -> Question:
        return Question(size=len(self._body), read=self._read, write=self._write, has_left=has_left)

    def _read(self, loaded: Loaded) -> Sized:
        check_version(self._version, loaded, self._model)
        if not 0 <= self._json_bytes <= len(self._body):
            raise InputError(
                f"Inference-Header-Content-Length is {self._json_bytes:,}, and the body has "
                f"{len(self._body):,} bytes."
            )
        self._header = parse(self._body[: self._json_bytes])
        inputs = self._header.get("inputs")
        if not isinstance(inputs, list) or not all(isinstance(one, dict) for one in inputs):
            raise InputError("The request has no 'inputs', expected a list of tensors.")
        check_outputs((one.get("name") for one in self._outputs()), loaded)
        specs = loaded.scorer.inputs
        return loaded.scorer.read_tensors(checked(self._tensors(inputs), specs))

    def _tensors(self, inputs: list[dict[str, Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
        at = self._json_bytes
        for one in inputs:
            name = str(one.get("name"))
            kind = name, one.get("datatype", ""), one.get("shape", "")
            size = _parameters(one).get("binary_data_size")
            if size is None:
                yield name, of_lists(*kind, one.get("data"))
                continue
            if type(size) is not int or not 0 <= size <= len(self._body) - at:
                raise InputError(
                    f"{name!r} has binary_data_size {size!r:.40}, and {len(self._body) - at:,} "
                    "bytes are left of the body."
                )
            yield name, of_bytes(*kind, memoryview(self._body)[at : at + size])
            at += size
        if at != len(self._body):
            raise InputError(f"The body has {len(self._body) - at:,} bytes that no input names.")

    def _outputs(self) -> list[dict[str, Any]]:
        outputs = self._header.get("outputs", [])
        if not isinstance(outputs, list) or not all(isinstance(one, dict) for one in outputs):
            raise InputError("'outputs' is not a list of objects.")
        return outputs

    def _write(self, loaded: Loaded, scores: NDArray[Any]) -> tuple[bytes, int | None]:
        """The body, and the length of its JSON if binary tensors follow it."""
        spec = loaded.scorer.output
        output: dict[str, Any] = {
            "name": spec.name, "datatype": spec.datatype, "shape": list(scores.shape)
        }  # fmt: skip
        answer = {"model_name": self._model, "model_version": loaded.version, "outputs": [output]}
        if "id" in self._header:
            answer["id"] = str(self._header["id"])
        if not self._wants_binary():
            output["data"] = scores.ravel().tolist()
            return pydantic_core.to_json(answer), None
        raw = to_bytes(scores)
        output["parameters"] = {"binary_data_size": len(raw)}
        header = pydantic_core.to_json(answer)
        return header + raw, len(header)

    def _wants_binary(self) -> bool:
        every = _parameters(self._header).get("binary_data_output", False)
        of_output = [_parameters(one).get("binary_data", every) for one in self._outputs()]
        return bool(of_output[0] if of_output else every)


def _parameters(part: Mapping[str, Any]) -> dict[str, Any]:
    found = part.get("parameters", {})
    if not isinstance(found, dict):
        raise InputError("'parameters' is not an object.")
    return found
