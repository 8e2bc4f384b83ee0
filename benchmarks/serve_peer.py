"""The usual way to serve an ONNX model: onnxruntime behind FastAPI. A peer of `trainmark serve`.

python -m benchmarks.serve_peer model.onnx --port 8100
"""

import argparse

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

NUMBERS, TABLES = 13, 26


class Rows(BaseModel):
    """Numbers and ids."""

    numerical: list[list[float]]
    categorical: list[list[int]]


class Clicks(BaseModel):
    """Their scores."""

    scores: list[float]


def build_app(model: str) -> FastAPI:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # with more, its threads wait for each other in a busy loop
    session = onnxruntime.InferenceSession(model, options)
    app = FastAPI()

    @app.post("/score")
    def score(rows: Rows) -> Clicks:
        given = {
            "numerical": np.array(rows.numerical, np.float32),
            "categorical": np.array(rows.categorical, np.int64),
        }
        return Clicks(scores=session.run(None, given)[0].tolist())

    @app.post("/binary")
    async def binary(request: Request) -> Response:
        body = await request.body()
        rows = len(body) // (4 * NUMBERS + 8 * TABLES)
        split = 4 * NUMBERS * rows
        given = {
            "numerical": np.frombuffer(body[:split], np.float32).reshape(rows, NUMBERS),
            "categorical": np.frombuffer(body[split:], np.int64).reshape(rows, TABLES),
        }
        return Response(session.run(None, given)[0].tobytes())

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    chosen = parser.parse_args()
    uvicorn.run(build_app(chosen.model), port=chosen.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
