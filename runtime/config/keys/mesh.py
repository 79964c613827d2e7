"""The axes of a job's parallelism; ours, not DeepSpeed's."""

from __future__ import annotations

from .key import used

_SECTION = "mesh"
_MEANINGS = {
    "pp": "so many stages of a pipeline",
    "dp": "so many groups of ranks with samples of their own; left out, what remains",
    "ep": "so many ranks over which experts are divided",
    "sp": "so many ranks over which each sample is divided",
    "tp": "another spelling of tensor_parallel.autotp_size",
}

MESH = (
    *(
        used(f"{_SECTION}.{axis}", f"{meaning}; `dslaunch --mesh` says the same for the whole job")
        for axis, meaning in _MEANINGS.items()
    ),
    used(
        f"{_SECTION}.order",
        "which axes are inside which, the outermost first; left out, pp, dp, sp, tp. Axes of one rank may be "
        "left out; `dslaunch --mesh pp=2,order=dp-pp` says the same",
    ),
)
