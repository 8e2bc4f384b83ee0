"""Matrix products of cuBLASLt whose epilogues torch does not offer, through its C interface.

A product can leave the bits of its ReLU behind, and the product of the backward pass can take them:
it masks its result, and sums it over the batch for the bias, before anything is written. Factors in
fp8 can give a result in fp8. The library is the one that torch has loaded already.

cuBLASLt counts by columns. Tensors here lie row by row, which to it are transposed: it is asked for
the transposed result, with the factors exchanged.

Where the library, or an algorithm for a product, is missing, `run` returns False and the caller
goes another way.
"""

import ctypes
import enum
import functools
from collections.abc import Callable
from ctypes import (
    byref,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 * 2**20  # what the library itself advises for Hopper
CANDIDATES = 8  # algorithms to ask for, and to time
BITS_PER_ROW = 128  # the mask's rows are padded to a multiple of so many bits

# Values of the library's enumerations (cublasLt.h, cublas_api.h, library_types.h).
_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_COMPUTE_32F = 68
_NOT_SUPPORTED = 15


class Epilogue(enum.IntEnum):
    """What happens to a result before it is written."""

    NONE = 1
    BIAS = 4
    RELU_BIAS = 6
    RELU_BITS_BIAS = 134  # the bits where the ReLU was open are written, too
    MASK = 136  # zero where a ReLU was closed
    MASK_SUM = 152  # the same, and the sum over the result's rows, as a bias's gradient
    SUM_LEFT = 512  # the sum of the left factor's rows, beside the plain product


class _Setting(enum.IntEnum):
    """Attributes of a product's descriptor."""

    TRANSPOSE_A = 3
    TRANSPOSE_B = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    BITS_POINTER = 11
    BITS_PER_ROW = 12
    A_SCALE_POINTER = 17
    B_SCALE_POINTER = 18
    FAST_ACCUMULATION = 25
    BIAS_TYPE = 26


class _Preference(enum.IntEnum):
    """Attributes of a search for algorithms."""

    WORKSPACE_BYTES = 1
    ALIGNMENT_A = 5
    ALIGNMENT_B = 6
    ALIGNMENT_C = 7
    ALIGNMENT_D = 8


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Candidate(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class Product:
    """result[R, C] = left[R, K] @ right[K, C], then the epilogue."""

    left: Tensor
    right: Tensor
    result: Tensor
    left_transposed: bool = False
    """Whether `left` lies in memory as [K, R]."""
    right_transposed: bool = False
    """Whether `right` lies in memory as [C, K]. fp8 factors must, and the left one must not."""
    epilogue: Epilogue = Epilogue.NONE
    bias: Tensor | None = None
    """To add to each row, or to be filled with a sum."""
    bits: Tensor | None = None
    """The ReLU's mask, to write or to read (`new_bits`)."""
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    """What to multiply fp8 factors by, the left one's first: fp32, on the device; None: 1."""
    fast: bool = False
    """fp8: add up in the units' short accumulators."""

    def key(self) -> tuple[Any, ...]:
        """What an algorithm depends on."""
        tensors = (self.left, self.right, self.result)
        return (
            self.left.device,
            self.epilogue,
            self.left_transposed,
            self.right_transposed,
            self.fast,
            None if self.bias is None else self.bias.dtype,
            tuple(scale is None for scale in self.scales),
            *((tensor.shape, tensor.dtype, _alignment(tensor)) for tensor in tensors),
        )


def relu_product(x_BM: Tensor, w_NM: Tensor, b_N: Tensor) -> tuple[Tensor, Tensor] | None:
    """relu(x w^T + b), and the bits where the ReLU is open. None: not possible here."""
    B, N = len(x_BM), len(w_NM)
    if not _fits(x_BM, w_NM):
        return None
    y_BN, bits = x_BM.new_empty(B, N), new_bits(B, N, x_BM.device)
    product = Product(
        left=x_BM,
        right=w_NM,
        right_transposed=True,
        result=y_BN,
        epilogue=Epilogue.RELU_BITS_BIAS,
        bias=b_N,
        bits=bits,
    )
    return (y_BN, bits) if run(product) else None


def masked_product(gradient_BN: Tensor, w_NM: Tensor, bits: Tensor) -> tuple[Tensor, Tensor] | None:
    """gradient w, zero where the ReLU was closed, and its sum over the batch. None: not possible.

    The sum is computed in fp32 and given in the factors' type: all that the library offers.
    """
    if not _fits(gradient_BN, w_NM):
        return None
    result_BM = gradient_BN.new_empty(len(gradient_BN), w_NM.shape[1])
    sums_M = result_BM.new_empty(w_NM.shape[1])
    product = Product(
        left=gradient_BN,
        right=w_NM,
        result=result_BM,
        epilogue=Epilogue.MASK_SUM,
        bias=sums_M,
        bits=bits,
    )
    return (result_BM, sums_M) if run(product) else None


def new_bits(rows: int, columns: int, device: torch.device) -> Tensor:
    """Room for a ReLU's mask, a bit per number."""
    row_bytes = -(-columns // BITS_PER_ROW) * BITS_PER_ROW // 8
    return torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)


def _fits(x: Tensor, w: Tensor) -> bool:
    """16 bits on a GPU, rows of whole 16 bytes: what tensor cores and their loads ask for."""
    is_half = x.dtype in (torch.bfloat16, torch.float16) and w.dtype == x.dtype
    in_rows = x.is_contiguous() and w.is_contiguous() and x.data_ptr() % 16 == 0
    return x.is_cuda and is_half and in_rows and len(x) > 0 and not any(n % 8 for n in w.shape)


# --- plans


def run(product: Product) -> bool:
    """Compute it on the current stream. False: the library or an algorithm is missing."""
    if library() is None:
        return False
    with torch.cuda.device(product.left.device):
        key = product.key()
        if key not in _PLANS:
            _PLANS[key] = Plan(product)
        return _PLANS[key].run(product)


class Plan:
    """Descriptors of a product, and the algorithms for it, the fastest first.

    On its first use the algorithms are timed, since the library's order is a guess. Another one may
    add up in another order and round otherwise: with `torch.use_deterministic_algorithms` the
    library's first is taken, and the same one every time.
    """

    def __init__(self, product: Product) -> None:
        self._descriptor = c_void_p()
        _call("MatmulDescCreate", byref(self._descriptor), _COMPUTE_32F, _TYPES[torch.float32])
        self._set(_Setting.TRANSPOSE_A, c_int32(product.right_transposed))
        self._set(_Setting.TRANSPOSE_B, c_int32(product.left_transposed))
        self._set(_Setting.EPILOGUE, c_uint32(product.epilogue))
        if product.bias is not None:
            self._set(_Setting.BIAS_TYPE, c_int32(_TYPES[product.bias.dtype]))
        if product.bits is not None:
            self._set(_Setting.BITS_PER_ROW, c_int64(product.bits.shape[1] * 8))
        if product.fast:
            self._set(_Setting.FAST_ACCUMULATION, c_int8(1))
        self._a, self._b = _layout(product.right), _layout(product.left)
        self._d = _layout(product.result)
        # The library wants a third summand described, even if it is nothing; never in fp8.
        is_fp8 = product.result.dtype in _FP8
        self._c = _layout(product.result, torch.bfloat16) if is_fp8 else self._d
        self._point(product)
        self.candidates = self._search(product)
        can_time = not torch.cuda.is_current_stream_capturing()
        if can_time and not torch.are_deterministic_algorithms_enabled():
            self.candidates.sort(key=lambda candidate: self.milliseconds(product, candidate))

    def run(self, product: Product) -> bool:
        if not self.candidates:
            return False
        self._point(product)
        self._launch(product, self.candidates[0])
        return True

    def milliseconds(self, product: Product, candidate: _Candidate, repeats: int = 5) -> float:
        """The best of a few timings, after a first call."""
        self._point(product)
        times = []
        for _ in range(1 + repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._launch(product, candidate)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times[1:])

    def _launch(self, product: Product, candidate: _Candidate) -> None:
        one, zero = c_float(1), c_float(0)
        workspace = product.result.new_empty(candidate.workspace_bytes, dtype=torch.uint8)
        result = product.result.data_ptr()
        _call(
            "Matmul", _handle(product.left.device), self._descriptor,
            byref(one), product.right.data_ptr(), self._a, product.left.data_ptr(), self._b,
            byref(zero), None if self._c is not self._d else result, self._c, result, self._d,
            byref(candidate.algorithm), workspace.data_ptr(), candidate.workspace_bytes,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def _search(self, product: Product) -> list[_Candidate]:
        preference = c_void_p()
        _call("MatmulPreferenceCreate", byref(preference))
        wanted = {
            _Preference.WORKSPACE_BYTES: c_uint64(WORKSPACE_BYTES),
            _Preference.ALIGNMENT_A: c_uint32(_alignment(product.right)),
            _Preference.ALIGNMENT_B: c_uint32(_alignment(product.left)),
            _Preference.ALIGNMENT_C: c_uint32(_alignment(product.result)),
            _Preference.ALIGNMENT_D: c_uint32(_alignment(product.result)),
        }
        for name, value in wanted.items():
            _call("MatmulPreferenceSetAttribute", preference, name, byref(value), sizeof(value))
        found, count = (_Candidate * CANDIDATES)(), c_int()
        status = _function("MatmulAlgoGetHeuristic")(
            _handle(product.left.device), self._descriptor, self._a, self._b, self._c, self._d,
            preference, CANDIDATES, found, byref(count),
        )  # fmt: skip
        _call("MatmulPreferenceDestroy", preference)
        if status == _NOT_SUPPORTED:
            return []
        _check("MatmulAlgoGetHeuristic", status)
        return [candidate for candidate in found[: count.value] if candidate.status == 0]

    def _point(self, product: Product) -> None:
        """Tell the descriptor where this call's vectors lie."""
        if product.bias is not None:
            self._set(_Setting.BIAS_POINTER, c_void_p(product.bias.data_ptr()))
        if product.bits is not None:
            self._set(_Setting.BITS_POINTER, c_void_p(product.bits.data_ptr()))
        # A is the right factor, B the left one.
        settings = (_Setting.B_SCALE_POINTER, _Setting.A_SCALE_POINTER)
        for name, scale in zip(settings, product.scales, strict=True):
            if scale is not None:
                self._set(name, c_void_p(scale.data_ptr()))

    def _set(self, name: _Setting, value: Any) -> None:
        _call("MatmulDescSetAttribute", self._descriptor, name, byref(value), sizeof(value))


# One for each shape: a run has few, and keeps them.
_PLANS: dict[tuple[Any, ...], Plan] = {}


def _layout(tensor: Tensor, dtype: torch.dtype | None = None) -> c_void_p:
    """A matrix that lies row by row, as the library sees it: by columns, and transposed."""
    rows, columns = tensor.shape
    layout = c_void_p()
    kind = _TYPES[dtype or tensor.dtype]
    _call("MatrixLayoutCreate", byref(layout), kind, columns, rows, columns)
    return layout


def _alignment(tensor: Tensor) -> int:
    """The power of two that divides the address, up to the most that the library cares for."""
    address = tensor.data_ptr()
    return min(address & -address, 256)


# --- the library

_MATMUL = [c_void_p] * 7 + [c_void_p] * 7 + [c_size_t, c_void_p]
_ARGUMENTS: dict[str, list[Any]] = {
    "Create": [c_void_p],
    "MatmulDescCreate": [c_void_p, c_int, c_int],
    "MatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "MatmulPreferenceCreate": [c_void_p],
    "MatmulPreferenceDestroy": [c_void_p],
    "MatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, c_void_p, c_void_p],
    "Matmul": _MATMUL,
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The cuBLASLt that this torch was built for; None without CUDA."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@functools.cache
def _function(name: str) -> Callable[..., int]:
    function = getattr(library(), f"cublasLt{name}")
    function.argtypes, function.restype = _ARGUMENTS[name], c_int
    return function


@functools.cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _call("Create", byref(handle))
    return handle


def _call(name: str, *arguments: Any) -> None:
    _check(name, _function(name)(*arguments))


def _check(name: str, status: int) -> None:
    if status == 0:
        return
    describe = library().cublasLtGetStatusString  # type: ignore[union-attr]
    describe.argtypes, describe.restype = [c_int], c_char_p
    raise RuntimeError(f"cublasLt{name} failed: {describe(status).decode()} (status {status}).")
