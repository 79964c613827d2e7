"""What a program says to layers that are divided over ranks: `dslaunch.tensor`."""

from __future__ import annotations

from .model_init import set_autotp_mode, tp_model_init

__all__ = ["set_autotp_mode", "tp_model_init"]
