"""The KServe v2 protocol over gRPC."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence, Sized
from typing import Any

import grpc
from numpy.typing import NDArray

from trainmark.errors import InputError
from trainmark.inference.server import keys, v2_web
from trainmark.inference.server.batching import Loaded, Question
from trainmark.inference.server.bodies import MAX_HELD_BYTES
from trainmark.inference.server.limits import Limits, status_of
from trainmark.inference.server.metrics import Metrics
from trainmark.inference.server.models import Models
from trainmark.inference.server.rpc_messages import MESSAGES, SERVICE
from trainmark.inference.server.tensors import (
    check_outputs,
    check_version,
    checked,
    of_bytes,
    of_lists,
    to_bytes,
)

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The codes of gRPC for the statuses of HTTP."""
OPEN = {"ServerLive", "ServerReady"}
MAX_MESSAGE_BYTES = 4 << 20
"""What gRPC's own servers take. A message is not seen before all of it has come, so that the number
of calls at a time follows from the largest: 64."""
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Where a message has the elements of a tensor, if they do not come as bytes."""

Method = Callable[[Any], Awaitable[Any]]


def build_server(
    models: Models, limits: Limits, metrics: Metrics, api_keys: tuple[bytes, ...]
) -> grpc.aio.Server:
    """A server without a port yet."""
    most = min(limits.body_bytes, MAX_MESSAGE_BYTES)
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", most), ("grpc.so_reuseport", 0)],
        maximum_concurrent_rpcs=min(limits.waiting, max(1, MAX_HELD_BYTES // most)),
    )
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            _guarded(method, () if name in OPEN else api_keys),
            request_deserializer=MESSAGES[f"{name}Request"].FromString,
            response_serializer=MESSAGES[f"{name}Response"].SerializeToString,
        )
        for name, method in _methods(models, metrics).items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return server


def _guarded(method: Method, api_keys: tuple[bytes, ...]) -> Any:
    """A method whose refusals become codes of gRPC."""

    async def answer(request: Any, context: Any) -> Any:
        try:
            given = dict(context.invocation_metadata()).get("authorization", "")
            keys.check(api_keys, str(given).encode())
            return await method(request)
        except InputError as error:
            await context.abort(CODES[status_of(error, v2=True)], str(error))

    return answer


def _methods(models: Models, metrics: Metrics) -> dict[str, Method]:
    async def live(request: Any) -> Any:
        return MESSAGES["ServerLiveResponse"](live=True)

    async def ready(request: Any) -> Any:
        return MESSAGES["ServerReadyResponse"](ready=models.is_ready)

    async def model_ready(request: Any) -> Any:
        is_ready = v2_web.is_served(models.named(request.name), request.version)
        return MESSAGES["ModelReadyResponse"](ready=is_ready)

    async def server(request: Any) -> Any:
        return MESSAGES["ServerMetadataResponse"](**v2_web.SERVER)

    async def metadata(request: Any) -> Any:
        loaded = models.named(request.name).loaded()
        check_version(request.version, loaded, request.name)
        return MESSAGES["ModelMetadataResponse"](**v2_web.describe(request.name, loaded))

    async def infer(request: Any) -> Any:
        model = models.named(request.model_name)
        with metrics.request(model.name, "v2-grpc"):
            return await model.answer(_question(request))

    return {
        "ServerLive": live,
        "ServerReady": ready,
        "ModelReady": model_ready,
        "ServerMetadata": server,
        "ModelMetadata": metadata,
        "ModelInfer": infer,
    }


# --- tensors


def _question(request: Any) -> Question:
    task = asyncio.current_task()

    def read(loaded: Loaded) -> Sized:
        check_version(request.model_version, loaded, request.model_name)
        check_outputs((output.name for output in request.outputs), loaded)
        tensors = _tensors(request.inputs, request.raw_input_contents)
        return loaded.scorer.read_tensors(checked(tensors, loaded.scorer.inputs))

    def write(loaded: Loaded, scores: NDArray[Any]) -> Any:
        spec = loaded.scorer.output
        output = {"name": spec.name, "datatype": spec.datatype, "shape": scores.shape}
        return MESSAGES["ModelInferResponse"](
            model_name=request.model_name,
            model_version=loaded.version,
            id=request.id,
            outputs=[output],
            raw_output_contents=[to_bytes(scores)],
        )

    return Question(
        size=sum(map(len, request.raw_input_contents)) or request.ByteSize(),
        read=read,
        write=write,
        has_left=lambda: task is not None and task.done(),
    )


def _tensors(inputs: Sequence[Any], raw: Sequence[bytes]) -> Iterator[tuple[str, NDArray[Any]]]:
    if raw and len(raw) != len(inputs):
        raise InputError(
            f"The request has {len(inputs)} inputs and {len(raw)} raw_input_contents, expected as "
            "many."
        )
    for place, one in enumerate(inputs):
        kind = one.name, one.datatype, list(one.shape)
        if raw:
            yield one.name, of_bytes(*kind, memoryview(raw[place]))
        else:
            elements = list(getattr(one.contents, CONTENTS.get(one.datatype, "bytes_contents")))
            yield one.name, of_lists(*kind, elements)
