"""Numbers as people read them: 1.5 G, 20 ms.

Source: DeepSpeed 0.19.8 profiling/flops_profiler/profiler.py, `number_to_string` and those beside
        it: the same texts
"""

from __future__ import annotations

_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
_PRECISION = 2


def number_to_string(num: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return `num` in `units`, one of T G M K m u and "", or in those that fit it best."""
    if units is None:
        units = "" if num == 0 else next((unit for unit, one in _MAGNITUDES.items() if num >= one), "u")
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return operations per second, as "1.5 TFLOPS"."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return multiply-accumulate operations, as "1.5 GMACs"."""
    return f"{number_to_string(macs, units, precision)}MACs"


def duration_to_string(duration: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return seconds, as "1.5 ms"."""
    return f"{number_to_string(duration, units, precision)}s"


def bytes_to_string(b: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return bytes in powers of 1000, as "1.5 GB"."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = _PRECISION) -> str:
    """Return a count of parameters, a thousand millions being B, as "1.5 B"."""
    units = "G" if units == "B" else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()
