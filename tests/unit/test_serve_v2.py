"""`trainmark serve` speaks the KServe v2 protocol: the public clients of Triton and curl ask it."""

import json
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.unit.served import (
    TEST_LINES,
    Doubler,
    TestClient,
    app_of,
    client_of,
    process,
    served,
    source_of,
)
from tests.unit.test_prepare_npy import read
from tests.unit.test_serve_scores import predictions
from trainmark.errors import InputError
from trainmark.inference.server import rpc_messages
from trainmark.inference.server import tensors as v2_tensors
from trainmark.inference.server.limits import Limits
from trainmark.inference.server.metrics import Metrics
from trainmark.inference.server.models import Models
from trainmark.inference.server.web import build_app
from trainmark.scoring import TensorSpec
from trainmark.workloads.dlrm.prepared_values import PreparedValues

clients = {
    "http": pytest.importorskip("tritonclient.http"),
    "grpc": pytest.importorskip("tritonclient.grpc"),
}
NAME = "dlrm-demo"
TLS = Path(__file__).parent / "tls"


def grpc_address(lines: list[str]) -> str:
    (address,) = [line.split()[-1] for line in lines if line.startswith("gRPC at ")]
    return address


@pytest.fixture(scope="module")
def addresses(clicks: Path) -> Iterator[dict[str, str]]:
    """A server of prepared values, which two models share."""
    words = (str(clicks / "run"), f"other={clicks / 'run'}", "--values", "prepared")
    with process(*words, "--grpc-port", "0") as (_, url, lines):
        yield {"http": url.removeprefix("http://"), "grpc": grpc_address(lines)}


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, addresses: dict[str, str]) -> Any:
    kind = request.param
    return clients[kind], clients[kind].InferenceServerClient(addresses[kind])


def tensors(module: Any, arrays: dict[str, Any], **more: Any) -> list[Any]:
    kinds = {"f4": "FP32", "f8": "FP64", "i8": "INT64", "i4": "INT32", "O": "BYTES"}
    found = []
    for name, array in arrays.items():
        kind = kinds[array.dtype.str.lstrip("<|")]
        found.append(module.InferInput(name, list(array.shape), kind))
        found[-1].set_data_from_numpy(array, **more)
    return found


def prepared(clicks: Path) -> dict[str, Any]:
    rows = read(clicks / "data", "test")
    numerical = np.asarray(rows["numerical"]).astype(np.float32)
    return {"numerical": numerical, "categorical": np.stack(rows["ids"], 1).astype(np.int64)}


# --- what Triton's clients do


def test_health_and_metadata(client: Any) -> None:
    _, asked = client
    assert asked.is_server_live()
    assert asked.is_server_ready()
    assert asked.is_model_ready(NAME)
    assert asked.is_model_ready(NAME, "7")
    if client[0] is clients["http"]:
        assert not asked.is_model_ready(NAME, "8")
    else:
        with pytest.raises(Exception, match="has version 7, not 8"):
            asked.is_model_ready(NAME, "8")
    as_json = {} if client[0] is clients["http"] else {"as_json": True}
    assert asked.get_server_metadata(**as_json)["extensions"] == ["binary_tensor_data"]
    told = asked.get_model_metadata("other", **as_json)
    assert told["name"] == "other"
    assert told["versions"] == ["7"]  # the step
    shapes = {one["name"]: (one["datatype"], [*map(int, one["shape"])]) for one in told["inputs"]}
    assert shapes == {"numerical": ("FP32", [-1, 13]), "categorical": ("INT64", [-1, 26])}
    assert [one["name"] for one in told["outputs"]] == ["clicks"]


def test_scores_are_those_of_the_evaluation(client: Any, clicks: Path) -> None:
    module, asked = client
    arrays = prepared(clicks)
    expected = predictions(clicks / "run", "test")
    found = asked.infer(NAME, tensors(module, arrays), request_id="seven")
    np.testing.assert_allclose(found.as_numpy("clicks"), expected, atol=1e-6)
    answer = found.get_response()
    if module is clients["grpc"]:
        assert (answer.id, answer.model_name, answer.model_version) == ("seven", NAME, "7")
    else:
        assert (answer["id"], answer["model_name"], answer["model_version"]) == ("seven", NAME, "7")
    narrow = arrays | {"categorical": arrays["categorical"].astype(np.int32)}
    outputs = [module.InferRequestedOutput("clicks")]
    found = asked.infer("other", tensors(module, narrow), outputs=outputs, model_version="7")
    np.testing.assert_allclose(found.as_numpy("clicks"), expected, atol=1e-6)


def test_json_binary_and_compressed_are_the_same(addresses: dict[str, str], clicks: Path) -> None:
    module = clients["http"]
    asked, arrays = module.InferenceServerClient(addresses["http"]), prepared(clicks)
    expected = asked.infer(NAME, tensors(module, arrays)).as_numpy("clicks")
    for sent in (True, False):
        for wanted in (True, False):
            outputs = [module.InferRequestedOutput("clicks", binary_data=wanted)]
            inputs = tensors(module, arrays, binary_data=sent)
            for packed in (None, "gzip", "deflate"):
                found = asked.infer(
                    NAME, inputs, outputs=outputs, request_compression_algorithm=packed
                )
                np.testing.assert_array_equal(found.as_numpy("clicks"), expected)
                assert ("data" in found.get_response()["outputs"][0]) != wanted


def test_refusals_reach_the_client(client: Any, clicks: Path) -> None:
    module, asked = client
    arrays = prepared(clicks)
    from tritonclient.utils import InferenceServerException

    def refusal(name: str = NAME, given: Any = arrays, **more: Any) -> tuple[str, str]:
        with pytest.raises(InferenceServerException) as caught:
            asked.infer(name, tensors(module, given), **more)
        return str(caught.value.status()).removeprefix("StatusCode."), caught.value.message()

    bad, missing = {"400", "INVALID_ARGUMENT"}, {"404", "NOT_FOUND"}
    ids = arrays["categorical"].copy()
    ids[3, 2] = 10**6
    for status, part, found in [
        (missing, "There is no model 'x' here, but dlrm-demo, other.", refusal("x")),
        (missing, "has version 7, not 8", refusal(model_version="8")),
        (bad, "expected numerical, categorical", refusal(given={"numerical": ids})),
        (bad, "Row 3: cat_2.bin is 1000000", refusal(given=arrays | {"categorical": ids})),
        (bad, "of shape [-1, 26]", refusal(given=arrays | {"categorical": ids[:, :3]})),
        (bad, "FP32 of shape [100, 26]", refusal(given=arrays | {"categorical": ids.astype("f4")})),
        (bad, "There is no output 'y'", refusal(outputs=[module.InferRequestedOutput("y")])),
        (bad, "numbers of rows", refusal(given=arrays | {"categorical": ids[:3]})),
    ]:
        assert found[0] in status
        assert part in found[1]


def test_raw_values(clicks: Path) -> None:
    """Numbers with NaN for a missing one, and texts; whole numbers that a float can tell."""
    numbers = np.array([[float(field or "nan") for field in line[1:14]] for line in TEST_LINES])
    texts = np.array([[field.encode() for field in line[14:]] for line in TEST_LINES], object)
    kept = ~(np.abs(numbers) >= 2.0**53).any(1)
    assert kept.sum() > 10
    arrays = {"numerical": numbers[kept], "categorical": texts[kept]}
    expected = np.array(predictions(clicks / "run", "test"))[kept]
    with process(str(clicks / "run"), "--grpc-port", "0") as (_, url, lines):
        at = {"http": url.removeprefix("http://"), "grpc": grpc_address(lines)}
        for kind, module in clients.items():
            asked = module.InferenceServerClient(at[kind])
            found = asked.infer(NAME, tensors(module, arrays)).as_numpy("clicks")
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_messages_have_the_fields_of_tritons() -> None:
    from tritonclient.grpc import service_pb2

    nested = {"TensorMetadata": "ModelMetadataResponse", "InferInputTensor": "ModelInferRequest",
              "InferRequestedOutputTensor": "ModelInferRequest",
              "InferOutputTensor": "ModelInferResponse"}  # fmt: skip
    compared = 0
    for name, ours in rpc_messages.MESSAGES.items():
        outer = getattr(service_pb2, nested.get(name, name))
        theirs = (getattr(outer, name) if name in nested else outer).DESCRIPTOR.fields_by_name
        for field in ours.DESCRIPTOR.fields:
            other = theirs[field.name]
            assert (field.number, field.type) == (other.number, other.type), (name, field.name)
            assert field.is_repeated == _is_repeated(other)
            compared += 1
    assert compared > 50


def _is_repeated(field: Any) -> bool:
    found = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if found is None else found)


def test_elements_that_are_no_bytes(addresses: dict[str, str], clicks: Path) -> None:
    """gRPC's other way to send tensors, by the messages that Triton's client has."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    arrays, request = prepared(clicks), service_pb2.ModelInferRequest(model_name=NAME)
    for name, kind, field in [
        ("numerical", "FP32", "fp32_contents"),
        ("categorical", "INT64", "int64_contents"),
    ]:
        one = request.inputs.add(name=name, datatype=kind, shape=arrays[name].shape)
        getattr(one.contents, field).extend(arrays[name].ravel().tolist())
    with grpc.insecure_channel(addresses["grpc"]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelStatistics(service_pb2.ModelStatisticsRequest())
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    found = np.frombuffer(answer.raw_output_contents[0], np.float32)
    np.testing.assert_allclose(found, predictions(clicks / "run", "test"), atol=1e-6)


@pytest.mark.parametrize(("limits", "most"), [(Limits(), 64), (Limits(waiting=3), 3)])
def test_messages_of_all_calls_together_are_bounded(
    limits: Limits, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 of 4 MiB, or as many as may wait."""
    import grpc

    from trainmark.inference.server import rpc

    server = Mock()
    monkeypatch.setattr(grpc.aio, "server", server)
    rpc.build_server(Models([], limits, Metrics()), limits, Metrics(), ())
    assert server.call_args.kwargs["maximum_concurrent_rpcs"] == most


# --- curl


def curl(*words: str) -> tuple[int, str]:
    line = ["curl", "-s", "--max-time", "60", "-w", "\n%{http_code}", *words]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    body, _, status = said.rpartition("\n")
    return int(status), body


def test_curl(addresses: dict[str, str], clicks: Path, tmp_path: Path) -> None:
    url = f"http://{addresses['http']}"
    assert curl(f"{url}/v2/health/live")[0] == 200
    assert curl(f"{url}/v2/health/ready")[0] == 200
    assert json.loads(curl(f"{url}/models")[1]) == {"models": [NAME, "other"]}
    expected = predictions(clicks / "run", "test")[0]
    (tmp_path / "row.json").write_text(curl(f"{url}/models/other/example")[1])
    status, answer = curl("-d", f"@{tmp_path / 'row.json'}", f"{url}/models/other/score")
    assert (status, len(json.loads(answer)["scores"])) == (200, 1)
    one = [
        {"name": name, "shape": [1, array.shape[1]], "datatype": kind, "data": array[:1].tolist()}
        for (name, array), kind in zip(prepared(clicks).items(), ("FP32", "INT64"), strict=True)
    ]
    (tmp_path / "request.json").write_text(json.dumps({"inputs": one, "id": "a"}))
    data = f"@{tmp_path / 'request.json'}"
    for path in (f"/v2/models/{NAME}/infer", f"/v2/models/{NAME}/versions/7/infer"):
        status, answer = curl("-d", data, url + path)
        assert status == 200
        assert json.loads(answer)["outputs"][0]["data"] == pytest.approx([expected], abs=1e-6)
    assert curl("-d", data, f"{url}/v2/models/none/infer")[0] == 404
    assert curl(f"{url}/v2/models/{NAME}/infer")[0] == 405
    assert curl(f"{url}/nothing")[0] == 404


def test_metrics(addresses: dict[str, str], clicks: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    url = f"http://{addresses['http']}"

    def values() -> dict[tuple[str, str], float]:
        told = curl(f"{url}/metrics")[1]
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(told):
            for sample in family.samples:
                key = sample.name, sample.labels.get("status", "")
                if sample.labels.get("model") == NAME:
                    found[key] = found.get(key, 0) + sample.value
        return found

    before = values()
    asked = clients["http"].InferenceServerClient(addresses["http"])
    arrays = prepared(clicks)
    asked.infer(NAME, tensors(clients["http"], arrays))
    curl("-d", "{", f"{url}/score")
    after = values()
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["trainmark_serve_requests_total", "200"] == 1
    assert grown["trainmark_serve_requests_total", "422"] == 1
    assert grown["trainmark_serve_seconds_count", ""] == 2
    assert grown["trainmark_serve_pass_rows_sum", ""] == len(arrays["numerical"])
    assert after["trainmark_serve_step", ""] == 7
    assert after["trainmark_serve_loads_total", ""] == 1
    assert after["trainmark_serve_waiting", ""] == 0


# --- who may ask


def test_keys_and_tls(clicks: Path, tmp_path: Path) -> None:
    keys, certificate = tmp_path / "keys", str(TLS / "certificate.pem")
    keys.write_text("a-key-of-yesterday\na-key-of-today-0001\n")
    tls = ("--tls-certificate", certificate, "--tls-key", str(TLS / "key.pem"))
    words = (str(clicks / "run"), "--api-key", str(keys), "--grpc-port", "0")
    with process(*words, *tls) as (_, url, lines):
        assert url.startswith("https://")
        trust = ("--cacert", certificate)
        assert curl(*trust, f"{url}/v2/health/ready")[0] == 200  # for whoever starts servers
        status, answer = curl(*trust, f"{url}/v2/models/{NAME}")
        assert (status, list(json.loads(answer))) == (401, ["error"])
        assert curl(*trust, "-d", "{}", f"{url}/score")[0] == 401
        assert curl(*trust, f"{url}/metrics")[0] == 401
        for key in ("a-key-of-today-0001", "a-key-of-yesterday", "another"):
            header = ("-H", f"Authorization: Bearer {key}")
            status = 401 if key == "another" else 200
            assert curl(*trust, *header, f"{url}/model")[0] == status
        asked = clients["grpc"].InferenceServerClient(
            grpc_address(lines), ssl=True, root_certificates=certificate
        )
        good = {"authorization": "Bearer a-key-of-today-0001"}
        assert asked.is_server_live()
        assert asked.is_model_ready(NAME, headers=good)
        with pytest.raises(Exception, match="UNAUTHENTICATED"):
            asked.is_model_ready(NAME)


# --- bad requests


def infer(client: TestClient, body: Any, **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(f"/v2/models/{NAME}/infer", content=content, headers=headers)


def one_input(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "numerical", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]} | changes
    return {"inputs": [{key: value for key, value in tensor.items() if value is not None}]}


BINARY = {"data": None, "parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected a JSON object"),
        ({}, "no 'inputs'"),
        ({"inputs": [7]}, "no 'inputs'"),
        ({"inputs": []}, "the inputs none; expected numerical, categorical"),
        (one_input(datatype="FP8"), "datatype 'FP8', expected one of BOOL"),
        (one_input(datatype=[]), "datatype [], expected one of BOOL"),
        ({"inputs": one_input()["inputs"] * 2}, "the inputs 'numerical', 'numerical'; expected"),
        (one_input(shape=[1, -2]), "shape [1, -2], expected a list of sizes"),
        (one_input(shape="12"), "expected a list of sizes"),
        (one_input(shape=None), "expected a list of sizes"),
        (one_input(data=None), "no 'data', expected a list of 2 elements"),
        (one_input(data=[1]), "1 elements, expected 2"),
        (one_input(data=[[1], [2, 3]]), "unequal lists"),
        (one_input(data=["a", "b"]), "not FP32"),
        (one_input(datatype="INT64", data=[1.5, 2.0]), "not INT64"),
        (
            one_input(datatype="INT32", data=[1, 2**32 + 5]),
            f"the value {2**32 + 5}, expected INT32",
        ),
        (one_input(datatype="UINT64", data=[1, -1]), "the value -1, expected UINT64"),
        (one_input(datatype="BYTES", data=[1, 2]), "not texts"),
        (one_input(**BINARY), "0 bytes are left of the body"),
        (one_input(parameters=[1]), "'parameters' is not an object"),
        ({"inputs": [], "outputs": 7}, "'outputs' is not a list"),
    ],
)
def test_bad_requests(clicks_client: TestClient, body: Any, part: str) -> None:
    answer = infer(clicks_client, body)
    assert answer.status_code == 400
    assert part in answer.json()["error"]


@pytest.mark.parametrize(
    ("header", "size", "raw", "part"),
    [
        (one_input(**BINARY), None, bytes(7), "binary_data_size 8, and 7 bytes"),
        (one_input(**BINARY), None, bytes(9), "1 bytes that no input names"),
        (one_input(**BINARY, shape=[3]), None, bytes(8), "8 bytes, expected 12"),
        (one_input(**BINARY), "9999", bytes(8), "Inference-Header-Content-Length is 9,999"),
        (one_input(**BINARY), "-1", bytes(8), "expected a number of bytes"),
        (one_input(**BINARY, datatype="BYTES"), None, b"\x09\0\0\0abcd", "ends within an element"),
        (one_input(**BINARY, datatype="BYTES"), None, bytes(8), "expected numerical, categorical"),
    ],
)
def test_bad_binary_tensors(
    clicks_client: TestClient, header: Any, size: str | None, raw: bytes, part: str
) -> None:
    text = json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": size or str(len(text))}
    answer = infer(clicks_client, text + raw, **headers)
    assert answer.status_code == 400
    assert part in answer.json()["error"]


@pytest.fixture(scope="module")
def clicks_client(clicks: Path) -> TestClient:
    return served(clicks / "run", values="prepared")


def test_integers_do_not_become_others() -> None:
    spec = TensorSpec(name="ids", datatype="INT64", shape=(-1,))
    good = np.array([0, 2**63 - 1], np.uint64)
    assert v2_tensors.checked([("ids", good)], [spec])["ids"].tolist() == good.tolist()
    with pytest.raises(InputError, match=f"the value {2**64 - 1}, expected INT64"):
        v2_tensors.checked([("ids", np.array([2**64 - 1], np.uint64))], [spec])


def test_a_text_among_numbers_takes_no_room_of_theirs() -> None:
    rows = [[1.0]] * 1000 + [["x" * 10_000]]
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="not FP32"):
            v2_tensors.of_lists("numbers", "FP32", [1001, 1], rows)
        with pytest.raises(InputError, match="Row 1000: numbers"):
            PreparedValues(["numbers"], [], []).of_lists(rows, [[]] * 1001)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- live and ready


def test_live_before_it_is_ready() -> None:
    metrics, limits = Metrics(), Limits()
    models = Models([source_of(Doubler())], limits, metrics)
    client = TestClient(build_app(models, limits, metrics))
    assert client.get("/v2/health/live").status_code == 200
    for path in ("/v2/health/ready", "/v2/models/doubler/ready", "/model", "/v2/models/doubler"):
        assert client.get(path).status_code == 503
    answer = client.post("/score", json={"numbers": [1]})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "still loading" in answer.json()["detail"]
    models.load()
    assert client.get("/v2/health/ready").status_code == 200
    assert client.post("/score", json={"numbers": [1]}).json() == {"doubled": [2]}


def test_a_key_is_asked_for_in_the_form_that_was_spoken() -> None:
    app = app_of(source_of(Doubler()), api_keys=(b"a-key-of-today-0001",))
    client = TestClient(app)
    assert client.get("/health").status_code == 200
    answer = client.post("/score", json={"numbers": [1]})
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    bare = {"Authorization": "a-key-of-today-0001"}
    assert client.post("/score", json={"numbers": [1]}, headers=bare).status_code == 401
    good = {"Authorization": "Bearer a-key-of-today-0001"}
    assert client.post("/score", json={"numbers": [1]}, headers=good).json() == {"doubled": [2]}


def test_models_beside_each_other() -> None:
    class Tripler(Doubler):
        def score(self, requests: Any) -> Any:
            return super().score(requests) * 3 // 2

    client = client_of(source_of(Doubler(), "two"), source_of(Tripler(), "three"))
    body = {"numbers": [4]}
    assert client.post("/score", json=body).json() == {"doubled": [8]}  # the first
    assert client.post("/models/two/score", json=body).json() == {"doubled": [8]}
    assert client.post("/models/three/score", json=body).json() == {"doubled": [12]}
    answer = client.post("/models/four/score", json=body)
    assert (answer.status_code, "but two, three" in answer.text) == (404, True)
