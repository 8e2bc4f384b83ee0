"""cuBLASLt's GEMMs that torch does not offer, through its C interface.

These are fp8 GEMMs with a bias and a ReLU behind, and GEMMs with a summand that stays as it is:
torch would copy it first. The library is the one that torch has loaded already. Its first choice of
an algorithm is taken: it is the same in every run, and none of the others was measurably faster on
an H200.

cuBLASLt counts by columns. Tensors here lie row by row, which to it are transposed: it is asked for
the transposed result, with the factors exchanged.

Where the library, or an algorithm for a GEMM, is missing, `run` returns False and the caller
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
_NO_EPILOGUE, _BIAS, _RELU_BIAS = 1, 4, 6
_NOT_SUPPORTED = 15


class _Setting(enum.IntEnum):
    """Attributes of a GEMM's descriptor."""

    TRANSPOSE_A = 3
    EPILOGUE = 7
    BIAS_POINTER = 8
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


class _Found(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class Gemm:
    """result[R, C] = left[R, K] @ right[C, K]^T + summand[R, C]; with a bias [C], then
    relu(result + bias), or without `relu` result + bias. A summand has the result's type. All lie
    row by row; of 16 bits, the right factor may be a matrix that lies so, transposed."""

    left: Tensor
    right: Tensor
    result: Tensor
    summand: Tensor | None = None
    bias: Tensor | None = None
    relu: bool = True
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    """What to multiply fp8 factors by, the left one's first: fp32, on the device; None: 1."""
    fast: bool = False
    """fp8: add up in the tensor cores' short accumulators."""

    @property
    def third(self) -> Tensor:
        """What the library takes for a summand: it wants one, even if it is taken times 0."""
        return self.result if self.summand is None else self.summand

    def key(self) -> tuple[Any, ...]:
        """What an algorithm depends on."""
        tensors = (self.left, self.right, self.result, self.third)
        return (
            self.left.device,
            self.fast,
            self.summand is None,
            None if self.bias is None else (self.bias.dtype, self.relu),
            tuple(scale is None for scale in self.scales),
            self.right.is_contiguous(),
            *((tensor.shape, tensor.dtype, _alignment(tensor)) for tensor in tensors),
        )


# --- plans


def run(gemm: Gemm) -> bool:
    """Compute it on the current stream. False: the library or an algorithm is missing."""
    if library() is None:
        return False
    with torch.cuda.device(gemm.left.device):
        key = gemm.key()
        if key not in _PLANS:
            _PLANS[key] = Plan(gemm)
        return _PLANS[key].run(gemm)


class Plan:
    """Descriptors of a GEMM, and the algorithm for it."""

    def __init__(self, gemm: Gemm) -> None:
        self._descriptor = c_void_p()
        _call("MatmulDescCreate", byref(self._descriptor), _COMPUTE_32F, _TYPES[torch.float32])
        in_rows = gemm.right.is_contiguous()
        self._set(_Setting.TRANSPOSE_A, c_int32(in_rows))
        with_bias = _RELU_BIAS if gemm.relu else _BIAS
        self._set(_Setting.EPILOGUE, c_uint32(_NO_EPILOGUE if gemm.bias is None else with_bias))
        if gemm.bias is not None:
            self._set(_Setting.BIAS_TYPE, c_int32(_TYPES[gemm.bias.dtype]))
        if gemm.fast:
            self._set(_Setting.FAST_ACCUMULATION, c_int8(1))
        self._a = _layout(gemm.right if in_rows else gemm.right.t())
        self._b = _layout(gemm.left)
        self._d = _layout(gemm.result)
        # The summand, even if there is none, has the result's layout, but never a type of fp8.
        is_fp8 = gemm.result.dtype in _FP8
        self._c = _layout(gemm.result, torch.bfloat16) if is_fp8 else self._d
        self._point(gemm)
        self._found = self._search(gemm)

    def run(self, gemm: Gemm) -> bool:
        if self._found is None:
            return False
        self._point(gemm)
        self._launch(gemm, self._found)
        return True

    def _launch(self, gemm: Gemm, found: _Found) -> None:
        one, beta = c_float(1), c_float(0 if gemm.summand is None else 1)
        workspace = gemm.result.new_empty(found.workspace_bytes, dtype=torch.uint8)
        result = gemm.result.data_ptr()
        third = None if self._c is not self._d else gemm.third.data_ptr()
        _call(
            "Matmul", _handle(gemm.left.device), self._descriptor,
            byref(one), gemm.right.data_ptr(), self._a, gemm.left.data_ptr(), self._b,
            byref(beta), third, self._c, result, self._d,
            byref(found.algorithm), workspace.data_ptr(), found.workspace_bytes,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def _search(self, gemm: Gemm) -> _Found | None:
        preference = c_void_p()
        _call("MatmulPreferenceCreate", byref(preference))
        wanted = {
            _Preference.WORKSPACE_BYTES: c_uint64(WORKSPACE_BYTES),
            _Preference.ALIGNMENT_A: c_uint32(_alignment(gemm.right)),
            _Preference.ALIGNMENT_B: c_uint32(_alignment(gemm.left)),
            _Preference.ALIGNMENT_C: c_uint32(_alignment(gemm.third)),
            _Preference.ALIGNMENT_D: c_uint32(_alignment(gemm.result)),
        }
        for name, value in wanted.items():
            _call("MatmulPreferenceSetAttribute", preference, name, byref(value), sizeof(value))
        found, count = _Found(), c_int()
        status = _function("MatmulAlgoGetHeuristic")(
            _handle(gemm.left.device), self._descriptor, self._a, self._b, self._c, self._d,
            preference, 1, byref(found), byref(count),
        )  # fmt: skip
        _call("MatmulPreferenceDestroy", preference)
        if status == _NOT_SUPPORTED:
            return None
        _check("MatmulAlgoGetHeuristic", status)
        return found if count.value and found.status == 0 else None

    def _point(self, gemm: Gemm) -> None:
        """Tell the descriptor where this call's vectors lie."""
        if gemm.bias is not None:
            self._set(_Setting.BIAS_POINTER, c_void_p(gemm.bias.data_ptr()))
        # A is the right factor, B the left one.
        settings = (_Setting.B_SCALE_POINTER, _Setting.A_SCALE_POINTER)
        for name, scale in zip(settings, gemm.scales, strict=True):
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

_ARGUMENTS: dict[str, list[Any]] = {
    "Create": [c_void_p],
    "MatmulDescCreate": [c_void_p, c_int, c_int],
    "MatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatrixLayoutCreate": [c_void_p, c_int, c_uint64, c_uint64, c_int64],
    "MatmulPreferenceCreate": [c_void_p],
    "MatmulPreferenceDestroy": [c_void_p],
    "MatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, c_void_p, c_void_p],
    "Matmul": [c_void_p] * 14 + [c_size_t, c_void_p],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The cuBLASLt that this torch was built for; None without a GPU."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@functools.cache
def _function(name: str) -> Callable[..., int]:
    function = getattr(library(), f"cublasLt{name}")
    function.argtypes, function.restype = _ARGUMENTS[name], c_int
    typed: Callable[..., int] = function
    return typed


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
