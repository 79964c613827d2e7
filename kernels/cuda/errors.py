"""Errors that keep the CUDA kernels from running here."""

from __future__ import annotations


class CudaUnavailable(RuntimeError):
    """The kernels cannot be compiled or loaded on this machine; the message says what is
    missing and what to do.

    Nothing was written: another implementation of the same step can be used instead.
    """
