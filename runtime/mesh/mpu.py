"""An mpu: the object or module by which a program says how its ranks are arranged, as Megatron has it.

The methods of an mpu depend on its origin: old Megatron has get_model_parallel_rank(), new Megatron
get_tensor_model_parallel_rank(), and DeepSpeed's PipelineParallelGrid has both and get_slice_parallel_rank().
If a method is missing, or raises because the program made no such groups, the size of that axis is 1.

Source: DeepSpeed 0.19.8 utils/bwc.py, utils/groups.py, runtime/config.py; Megatron-LM core/parallel_state.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...shared.axes import Axes
from ..comm.wire import before_unwired
from ..errors import ConfigError

# Axis -> words between get_ and _world_size, _rank or _group; the first one for which a method exists counts.
_NAMES = {
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
    "dp": ("data_parallel",),
    "sp": ("sequence_parallel",),
    "tp": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
}
_SHARE = {  # in the order of comparison; the size of the last follows from the others
    "tp": "divide layers",
    "pp": "hold the stages of a model",
    "sp": "share a sequence",
    "dp": "train the same layers on data of their own",
}
_WAYS = {
    "pp": ", as the topology of a PipelineModule says",
    "tp": ", as the ds_config's tensor_parallel.autotp_size says",
}
_NOT_READY = (
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MpuSizes:
    """Numbers of ranks over which a program divides its data, sequences, layers and stages, by its mpu.

    `dp` is None if no method tells it.
    """

    pp: int
    dp: int | None
    sp: int
    tp: int


def read_mpu(mpu: Any, *, call: str = "initialize") -> MpuSizes:
    """Return the sizes in the mpu; `call` names the function that got it, for messages.

    Errors: ConfigError for an object that is no mpu, an mpu whose data-parallel groups are not made yet, or
    sizes that do not fit the job
    """
    names = {axis: _method(mpu, axis, "world_size") for axis in _NAMES}
    if not any(names.values()):
        raise ConfigError(
            f"{call}(mpu={mpu!r}): has none of the methods of an mpu, such as "
            "get_data_parallel_world_size() and get_model_parallel_world_size(); give an object that has, or "
            "leave mpu out"
        )
    sizes_by_axis: dict[str, int | None] = {}
    failed = []
    for axis, name in names.items():
        sizes_by_axis[axis], error = _size(mpu, name)
        if error and axis == "dp":
            raise ConfigError(
                f"{call}(mpu=...): its {name}() raises {error}; make its process groups before "
                f"{call}(), or leave mpu out"
            )
        failed += [f"{name}() raises {error}"] if error else []
    sizes = MpuSizes(
        pp=sizes_by_axis["pp"] or 1,
        dp=sizes_by_axis["dp"],
        sp=sizes_by_axis["sp"] or 1,
        tp=sizes_by_axis["tp"] or 1,
    )
    answers = [
        f"{name}() is {sizes_by_axis[axis]}"
        for axis, name in names.items()
        if sizes_by_axis[axis] is not None
    ]
    inner, num_ranks = sizes.pp * sizes.sp * sizes.tp, dist.get_world_size()
    if num_ranks % inner or (sizes.dp is not None and sizes.dp * inner != num_ranks):
        raise ConfigError(
            f"{call}(mpu=...): {', '.join(answers + failed)}; their product must be the "
            f"{num_ranks} ranks of the job, so give an mpu that was made for these"
        )
    return sizes


def check_mpu(mpu: Any, axes: Axes) -> None:
    """Check that the mpu's ranks lie along each axis as the job's ranks do.

    Order:  a collective of all ranks, because a misfit may show on some of them only
    Errors: ConfigError that names the ranks by the mpu and by the job
    """
    own = _misfit(mpu, axes)
    said = [""] * axes.world_size
    before_unwired()
    dist.all_gather_object(said, own)
    others = (f"on rank {rank}: {text}" for rank, text in enumerate(said) if text)
    text = own or next(others, "")
    if text:
        raise ConfigError(f"initialize(mpu=...): {text}")


def _misfit(mpu: Any, axes: Axes) -> str:
    """Return how this rank's place in the mpu differs from its place along the axes; "" if they agree."""
    rank, order = dist.get_rank(), ", ".join(axes.order)
    place = axes.coordinates(rank)
    for axis, share in _SHARE.items():
        name = _method(mpu, axis, "world_size")
        size, _ = _size(mpu, name)
        here = getattr(axes, axis)
        if size is not None and size != here:
            cure = "leave mpu out, or give one of that size"
            if axis == "tp" and size > 1:
                cure = (
                    f"set autotp_size to {size}, which divides a model that is given whole, or leave mpu out"
                )
            return (
                f"its {name}() is {size}, and the number of ranks that {share} is {here} here"
                f"{_WAYS.get(axis, '')}; {cure}"
            )
        if size in (None, 1):
            continue
        group = _group(mpu, axis)
        expected = list(axes.line_of(rank, (axis,)))
        if group is not None and group != expected:
            return (
                f"ranks {group} {share} there, and {expected} here: those that are neighbours once layers "
                f"are divided over {axes.tp} ranks, with the order {order} of axes; leave mpu out, or "
                "arrange its ranks so"
            )
        index, _ = _size(mpu, _method(mpu, axis, "rank"))
        if index is not None and index != place[axis]:
            return (
                f"rank {rank} is number {index} of the {size} that {share} there, and number {place[axis]} "
                f"here, with the order {order} of axes; leave mpu out, or arrange its ranks so"
            )
    return ""


def tensor_place(mpu: Any) -> tuple[int, int]:
    """Return this rank's index among the ranks that divide its layers, and their number; (0, 1) for None."""
    if mpu is None:
        return 0, 1
    size, _ = _size(mpu, _method(mpu, "tp", "world_size"))
    index, _ = _size(mpu, _method(mpu, "tp", "rank"))
    return index or 0, size or 1


def _method(mpu: Any, axis: str, what: str) -> str:
    """Return the name of the method that tells `what` of this axis, "" if there is none."""
    kinds = _NAMES[axis]
    if axis == "tp" and hasattr(mpu, "initialize_sequence_parallel"):
        kinds = kinds[:-1]  # in DeepSpeed's module for sequences the last name means sequences
    names = (f"get_{kind}_{what}" for kind in kinds)
    return next((name for name in names if callable(getattr(mpu, name, None))), "")


def _size(mpu: Any, name: str) -> tuple[int | None, str]:
    """Return the method's result, None if it is no number; then the reason, if the method raised."""
    if not name:
        return None, ""
    try:
        value = getattr(mpu, name)()
        return (None, "") if value is None or int(value) < 0 else (int(value), "")
    except _NOT_READY as error:
        return None, f"{type(error).__name__}: {error}"


def _group(mpu: Any, axis: str) -> list[int] | None:
    """Return the ranks of the mpu's group along the axis; None if it has no process group there."""
    name = _method(mpu, axis, "group")
    try:
        group = getattr(mpu, name)() if name else None
    except _NOT_READY:
        return None
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None
