"""`dslaunch.tensor`: the calls with which a program divides layers over ranks."""

from __future__ import annotations

from .model_init import set_autotp_mode, tp_model_init

__all__ = ["set_autotp_mode", "tp_model_init"]
