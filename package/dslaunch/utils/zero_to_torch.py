"""Weights from checkpoints, in the dtype that is asked for."""

from __future__ import annotations

from ..runtime.compat.zero_to_fp32 import main_with_dtype as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
