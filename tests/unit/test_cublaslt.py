"""The binding of cuBLASLt against a stand-in that reads its arguments as the library documents:
matrices by columns, from addresses. On a GPU, test_relu_mlp.py runs the library itself."""

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
from trainmark.kernels import relu_mlp as kernel
from trainmark.kernels.cublaslt import Epilogue, Product
from trainmark.kernels.relu_mlp import relu_mlp_reference

TYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}
# cublasLtMatmulDescAttributes_t, and the bits of cublasLtEpilogue_t
TRANSA, TRANSB, EPILOGUE, BIAS, AUX, AUX_LD, BIAS_TYPE = 3, 4, 7, 8, 11, 12, 26
RELU, ADD_BIAS, DRELU, BGRAD, HAS_AUX, BGRADB = 2, 4, 8, 16, 128, 512


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
            found[0].workspace_bytes = 64
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
        left, right = self.matrix(a, a_layout), self.matrix(b, b_layout)
        left = left.t() if wanted[TRANSA] else left
        right = right.t() if wanted[TRANSB] else right
        result, epilogue = left.double() @ right.double(), wanted[EPILOGUE]
        rows, columns = result.shape
        if epilogue & ADD_BIAS:
            result += memory(wanted[BIAS], rows, TYPES[wanted[BIAS_TYPE]])[:, None]
        if epilogue & HAS_AUX:
            assert wanted[AUX_LD] % 128 == 0
            assert wanted[AUX_LD] >= rows
            packed = memory(wanted[AUX], wanted[AUX_LD] * columns // 8, torch.uint8)
            bits = packed.view(columns, -1, 1) >> torch.arange(8).to(torch.uint8) & 1
            is_open = bits.view(columns, -1)[:, :rows].t()
            if epilogue & DRELU:
                result *= is_open
            else:
                is_open.copy_(result > 0)
                values = bits.view(columns, -1, 8) << torch.arange(8).to(torch.uint8)
                packed.copy_(values.sum(dim=-1, dtype=torch.uint8).flatten())
        if epilogue & RELU:
            result.relu_()
        sums = {BGRAD: result.sum(dim=1), BGRADB: right.double().sum(dim=0)}
        for flag, sum_ in sums.items():
            if epilogue & flag:
                memory(wanted[BIAS], len(sum_), TYPES[wanted[BIAS_TYPE]]).copy_(sum_)
        self.matrix(d, d_layout).copy_(result)
        return 0


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    library = StandIn()
    functions = library.functions()
    monkeypatch.setattr(cublaslt, "library", lambda: functions)
    monkeypatch.setattr(cublaslt, "_PLANS", {})
    monkeypatch.setattr(cublaslt, "_fits", lambda x, w: len(x) > 0)
    monkeypatch.setattr(cublaslt, "_alignment", lambda tensor: 256)  # as a GPU's memory has
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # nothing to time
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    caches = (cublaslt._function, cublaslt._handle)
    for cache in caches:
        cache.cache_clear()
    yield library
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("shape", [(1, 8, 8), (5, 16, 136), (33, 24, 128)])
def test_products_of_a_hidden_layer(stand_in: StandIn, shape: tuple[int, int, int]) -> None:
    """Twice with other tensors: a plan keeps nothing of those that it was made for."""
    torch.manual_seed(0)
    samples, inputs, outputs = shape
    for _ in range(2):
        x, weight = torch.randn(samples, inputs), torch.randn(outputs, inputs)
        bias, back = torch.randn(outputs), torch.randn(40, outputs)
        found = cublaslt.relu_product(x, weight, bias)
        assert found is not None
        output, bits = found
        torch.testing.assert_close(output, torch.addmm(bias, x, weight.t()).relu())
        gradient = torch.randn(samples, 40)
        found = cublaslt.masked_product(gradient, back, bits)
        assert found is not None
        exact = gradient @ back * (output > 0)
        torch.testing.assert_close(found[0], exact)
        torch.testing.assert_close(found[1], exact.sum(dim=0), rtol=1e-5, atol=1e-5)
    assert len(cublaslt._PLANS) == 2


def test_perceptron(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernel, "_masked_product", None)  # must not be called
    widths = (13, 24, 136, 8, 1)
    pairs = list(itertools.pairwise(widths))
    weights = [torch.randn(n, m, requires_grad=True) for m, n in pairs]
    biases = [torch.randn(n, requires_grad=True) for n in widths[1:]]
    x = torch.randn(37, widths[0], requires_grad=True)
    wanted = [x, *weights, *biases]
    ours = kernel._ReluMlp.apply(x, False, False, *weights, *biases)
    exact = relu_mlp_reference(x, weights, biases, last_relu=False)
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-3)
    upstream = torch.randn_like(exact)
    got = torch.autograd.grad(ours, wanted, upstream)
    for mine, theirs in zip(got, torch.autograd.grad(exact, wanted, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)
    assert len(cublaslt._PLANS) == 5  # three hidden layers forward, two backward


def test_a_weights_gradient_with_the_gradients_sum(stand_in: StandIn) -> None:
    gradient, x = torch.randn(33, 24), torch.randn(33, 40)
    result, sums = torch.empty(24, 40), torch.empty(24)
    assert cublaslt.run(
        Product(
            left=gradient,
            left_transposed=True,
            right=x,
            result=result,
            epilogue=Epilogue.SUM_LEFT,
            bias=sums,
        )
    )
    torch.testing.assert_close(result, gradient.t() @ x)
    torch.testing.assert_close(sums, gradient.sum(dim=0))


def test_nothing_found_is_not_an_error(stand_in: StandIn) -> None:
    stand_in.search_status = 15  # not supported
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    assert cublaslt.relu_product(x, weight, torch.randn(8)) is None


def test_a_failure_says_where(stand_in: StandIn) -> None:
    stand_in.search_status = 7
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="AlgoGetHeuristic failed: an invalid value"):
        cublaslt.relu_product(x, weight, torch.randn(8))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "999.0")
    cublaslt.library.cache_clear()
    one = torch.ones(1, 1)
    assert not cublaslt.run(Product(left=one, right=one, result=one))
    cublaslt.library.cache_clear()
