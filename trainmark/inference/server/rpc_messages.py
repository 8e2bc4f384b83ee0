"""The messages of the KServe v2 protocol over gRPC, by the field numbers of its specification.

Written out here instead of generated: what a generator writes works with one version of protobuf
only. They lie in a pool of their own, because a client in the same process brings messages of the
same names.

    https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

_MODEL = {"name": (1, "string"), "version": (2, "string")}
_PARAMETERS = "map InferParameter"
_TENSOR = {
    "name": (1, "string"),
    "datatype": (2, "string"),
    "shape": (3, "repeated int64"),
}
_CONTENTS = {"parameters": (4, _PARAMETERS), "contents": (5, "InferTensorContents")}

FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {"live": (1, "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {"ready": (1, "bool")},
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": {"ready": (1, "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {**_MODEL, "extensions": (3, "repeated string")},
    "ModelMetadataRequest": _MODEL,
    "TensorMetadata": _TENSOR,
    "ModelMetadataResponse": {
        "name": (1, "string"),
        "versions": (2, "repeated string"),
        "platform": (3, "string"),
        "inputs": (4, "repeated TensorMetadata"),
        "outputs": (5, "repeated TensorMetadata"),
    },
    # Of which one is set.
    "InferParameter": {
        "bool_param": (1, "bool"),
        "int64_param": (2, "int64"),
        "string_param": (3, "string"),
        "double_param": (4, "double"),
        "uint64_param": (5, "uint64"),
    },
    "InferTensorContents": {
        "bool_contents": (1, "repeated bool"),
        "int_contents": (2, "repeated int32"),
        "int64_contents": (3, "repeated int64"),
        "uint_contents": (4, "repeated uint32"),
        "uint64_contents": (5, "repeated uint64"),
        "fp32_contents": (6, "repeated float"),
        "fp64_contents": (7, "repeated double"),
        "bytes_contents": (8, "repeated bytes"),
    },
    "InferInputTensor": _TENSOR | _CONTENTS,
    "InferRequestedOutputTensor": {"name": (1, "string"), "parameters": (2, _PARAMETERS)},
    "ModelInferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "inputs": (5, "repeated InferInputTensor"),
        "outputs": (6, "repeated InferRequestedOutputTensor"),
        "raw_input_contents": (7, "repeated bytes"),
    },
    "InferOutputTensor": _TENSOR | _CONTENTS,
    "ModelInferResponse": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, _PARAMETERS),
        "outputs": (5, "repeated InferOutputTensor"),
        "raw_output_contents": (6, "repeated bytes"),
    },
}
"""Of each message: its fields, with number and type."""

_Field = descriptor_pb2.FieldDescriptorProto


def _describe(name: str, fields: dict[str, tuple[int, str]]) -> Any:
    message = descriptor_pb2.DescriptorProto(name=name)
    for field, (number, kind) in fields.items():
        if kind.startswith("map "):
            entry = "".join(word.title() for word in field.split("_")) + "Entry"
            of_entry = {"key": (1, "string"), "value": (2, kind.removeprefix("map "))}
            nested = message.nested_type.add()
            nested.CopyFrom(_describe(entry, of_entry))
            nested.options.map_entry = True
            kind = f"repeated {name}.{entry}"
        repeated, _, kind = kind.rpartition(" ")
        described = message.field.add(name=field, number=number)
        described.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
        if kind[0].isupper():
            described.type, described.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
        else:
            described.type = getattr(_Field, f"TYPE_{kind.upper()}")
    return message


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="v2.proto", package=PACKAGE, syntax="proto3")
    for name, fields in FIELDS.items():
        file.message_type.append(_describe(name, fields))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in FIELDS
    }


MESSAGES = _build()
