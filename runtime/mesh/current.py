"""The mesh of the engine that was made last: for functions that ask for ranks and groups without an engine.

Source: DeepSpeed 0.19.8 utils/groups.py, whose functions answer for the process, too
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch.distributed as dist

from ...shared.axes import Axes
from ..comm.mesh import ALONE, Axis
from ..comm.wire import Wire
from .domain import Domains

_last: tuple[weakref.ref[Domains], weakref.ref[dist.ProcessGroup]] | None = None


def note(domains: Domains) -> None:
    """Let the functions below answer from these domains while the domains and the job's process
    group live.
    """
    global _last
    _last = weakref.ref(domains), weakref.ref(_job())


def _job() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise AssertionError("there is no process group")
    return group


def _current() -> Domains | None:
    if _last is None or not dist.is_initialized():
        return None
    domains, group = _last
    return domains() if group() is _job() else None


def current_axes() -> Axes:
    """Return how the job's ranks are arranged; before an engine is made, every rank has its own samples."""
    domains = _current()
    return Axes(dp=dist.get_world_size()) if domains is None else domains.axes


def sharers() -> Axis | None:
    """Return the ranks that share dense parameters with this one; None before an engine is made."""
    domains = _current()
    return None if domains is None else domains.dense.comm.mesh.sharers


def expert_axes() -> Mapping[str, tuple[Axis, Axis]]:
    """Return, by DeepSpeed's name, the ranks that hold all experts together, and the ranks that hold the same
    experts.
    """
    domains = _current()
    return {} if domains is None else domains.of_experts


def data_axis() -> Axis | None:
    """Return the ranks that have other samples for the same layers; None before an engine is made."""
    domains = _current()
    return None if domains is None else domains.data


def tensor_axis() -> Axis:
    """Return the ranks that hold the parts of the same layers as this rank."""
    domains = _current()
    return ALONE if domains is None else domains.dense.comm.mesh.copies


def sequence_axis() -> Axis | None:
    """Return the ranks that share samples with this one, each with a part; None before an engine is made."""
    domains = _current()
    return None if domains is None else domains.sequence


def sums_over_sequence() -> bool:
    """Tell whether the gradients of ranks that share samples are added, not averaged."""
    domains = _current()
    return domains is not None and domains.dense.comm.mesh.rescale != 1.0


def current_wire() -> Wire | None:
    """Return the Wire that counts and watches what the engine sends; None before an engine is made."""
    domains = _current()
    return None if domains is None else domains.wire
