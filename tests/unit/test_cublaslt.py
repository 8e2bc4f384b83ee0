"""The binding of cuBLASLt against a stand-in that reads its arguments as the library documents:
matrices by columns, from addresses. On a GPU, test_fp8_mlp.py runs the library itself."""

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainmark.kernels import cublaslt
from trainmark.kernels.cublaslt import Gemm

TYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}
# cublasLtMatmulDescAttributes_t, and the bits of cublasLtEpilogue_t
TRANSA, EPILOGUE, BIAS, A_SCALE, B_SCALE, BIAS_TYPE = 3, 7, 8, 17, 18, 26
RELU, ADD_BIAS = 2, 4


def memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


class StandIn:
    """As much of the library as the binding calls."""

    def __init__(self) -> None:
        self.settings: dict[int, dict[int, Any]] = {}
        self.layouts: dict[int, tuple[int, int, int, int]] = {}
        self.search_status = 0
        self._names = itertools.count(1)

    def functions(self) -> SimpleNamespace:
        def create(out: Any, *_: Any) -> int:
            out._obj.value = next(self._names)
            self.settings[out._obj.value] = {}
            return 0

        def create_layout(out: Any, *layout: int) -> int:
            out._obj.value = next(self._names)
            self.layouts[out._obj.value] = layout  # type: ignore[assignment]
            return 0

        def set_one(descriptor: Any, name: int, value: Any, size: int) -> int:
            assert size == ctypes.sizeof(value._obj)
            self.settings[descriptor.value][int(name)] = value._obj.value
            return 0

        def search(*arguments: Any) -> int:
            *_, found, count = arguments
            count._obj.value = 1
            found._obj.workspace_bytes = 64
            return self.search_status

        def describe(status: int) -> bytes:
            return b"an invalid value"

        return SimpleNamespace(
            cublasLtCreate=create,
            cublasLtMatmulDescCreate=create,
            cublasLtMatmulDescSetAttribute=set_one,
            cublasLtMatrixLayoutCreate=create_layout,
            cublasLtMatmulPreferenceCreate=create,
            cublasLtMatmulPreferenceSetAttribute=set_one,
            cublasLtMatmulPreferenceDestroy=lambda preference: 0,
            cublasLtMatmulAlgoGetHeuristic=search,
            cublasLtMatmul=lambda *arguments: self.multiply(*arguments),
            cublasLtGetStatusString=describe,
        )

    def matrix(self, address: int, layout: Any) -> Tensor:
        kind, rows, columns, leading = self.layouts[layout.value]
        return memory(address, leading * columns, TYPES[kind]).view(columns, leading)[:, :rows].t()

    def multiply(
        self, handle: Any, descriptor: Any, alpha: Any, a: int, a_layout: Any, b: int,
        b_layout: Any, beta: Any, c: int, c_layout: Any, d: int, d_layout: Any, *_: Any,
    ) -> int:  # fmt: skip
        wanted = self.settings[descriptor.value]
        left = self.matrix(a, a_layout).double()
        left = left.t() if wanted[TRANSA] else left
        result = left @ self.matrix(b, b_layout).double()
        for name in (A_SCALE, B_SCALE):
            if name in wanted:
                result *= memory(wanted[name], 1, torch.float32)
        if beta._obj.value:
            result += beta._obj.value * self.matrix(c, c_layout)
        epilogue = wanted[EPILOGUE]
        if epilogue & ADD_BIAS:
            bias = memory(wanted[BIAS], len(result), TYPES[wanted[BIAS_TYPE]])
            result += bias[:, None]
        if epilogue & RELU:
            result.relu_()
        self.matrix(d, d_layout).copy_(result)
        return 0


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    library = StandIn()
    functions = library.functions()
    monkeypatch.setattr(cublaslt, "library", lambda: functions)
    monkeypatch.setattr(cublaslt, "_PLANS", {})
    monkeypatch.setattr(cublaslt, "_alignment", lambda tensor: 256)  # as a GPU's memory has
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    caches = (cublaslt._function, cublaslt._handle)
    for cache in caches:
        cache.cache_clear()
    yield library
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("scaled", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_summand", [False, True])
@pytest.mark.parametrize("in_columns", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 16, 136), (33, 24, 128)])
def test_products(
    stand_in: StandIn,
    shape: tuple[int, int, int],
    in_columns: bool,
    with_summand: bool,
    with_bias: bool,
    scaled: tuple[bool, bool],
) -> None:
    """Twice with other tensors: a plan keeps nothing of those that it was made for."""
    torch.manual_seed(0)
    samples, inputs, outputs = shape
    for _ in range(2):
        x, weight = torch.randn(samples, inputs), torch.randn(outputs, inputs)
        scales = tuple(torch.rand(()) if has else None for has in scaled)
        bias = torch.randn(outputs) if with_bias else None
        summand = torch.randn(samples, outputs) if with_summand else None
        result = torch.full((samples, outputs), torch.nan)
        assert cublaslt.run(
            Gemm(
                left=x,
                right=weight.t().contiguous().t() if in_columns else weight,
                result=result,
                summand=summand,
                bias=bias,
                scales=scales,  # type: ignore[arg-type]
            )
        )
        exact = x @ weight.t()
        for scale in scales:
            exact = exact if scale is None else exact * scale
        exact = exact if summand is None else exact + summand
        exact = exact if bias is None else (exact + bias).relu()
        torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5)
    assert len(cublaslt._PLANS) == 1


def test_nothing_found_is_not_an_error(stand_in: StandIn) -> None:
    stand_in.search_status = 15  # not supported
    one = torch.ones(1, 1)
    assert not cublaslt.run(Gemm(left=one, right=one, result=one))


def test_a_failure_says_where(stand_in: StandIn) -> None:
    stand_in.search_status = 7
    one = torch.ones(1, 1)
    with pytest.raises(RuntimeError, match="AlgoGetHeuristic failed: an invalid value"):
        cublaslt.run(Gemm(left=one, right=one, result=one))


@pytest.mark.parametrize("has_gpu", [True, False])
def test_without_the_library_or_a_gpu(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    monkeypatch.setattr(torch.version, "cuda", "999.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    if not has_gpu:
        monkeypatch.setattr(cublaslt.ctypes, "CDLL", object)  # the library of a build for CUDA
    cublaslt.library.cache_clear()
    one = torch.ones(1, 1)
    assert not cublaslt.run(Gemm(left=one, right=one, result=one))
    cublaslt.library.cache_clear()
