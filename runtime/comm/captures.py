"""CUDA graphs that the program captures while threads of ours use the GPU."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

_log = logging.getLogger("dslaunch")
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h


def ignore_captures() -> None:
    """Let this thread ask for events, lock memory and the like while another one captures a CUDA graph.

    A capture in CUDA's mode "global", which is torch's default, breaks at such a call of any thread that has
    not said that the captures of others are none of its concern. torch's own threads say it in C++; there is
    no call of torch's for it, so the driver is told.
    Source: CUDA driver API, cuThreadExchangeStreamCaptureMode
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    try:
        status = _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        _log.debug("captures of CUDA graphs are not ignored: %s", error)
    else:
        if status != 0:
            _log.debug("captures of CUDA graphs are not ignored: the driver answered %d", status)


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
