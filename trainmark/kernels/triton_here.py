"""Triton, or None in its place: a machine without a GPU need not have it."""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["tl", "triton"]
