"""Meshes that a job could have in place of its own. Arithmetic only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from math import prod
from typing import Any

from ..errors import LaunchError
from ..job.mesh import INSIDE_A_HOST, HostSlots, JobMesh, check_hosts, make_mesh
from ..options.mesh import MeshOptions

_LARGEST = 8  # ranks along an axis


def mesh_choices(
    given: JobMesh | None, *, axes: Collection[str], hosts: Sequence[HostSlots]
) -> list[JobMesh | None]:
    """Return the mesh of the job, then others with other sizes along `axes`, powers of two; tp and sp stay
    inside a host. None: no mesh.
    """
    num_ranks = sum(host.num_ranks for host in hosts)
    fewest = min(host.num_ranks for host in hosts)
    base = given or JobMesh(dp=num_ranks)
    found: list[JobMesh | None] = [given]
    sizes = [size for size in (1, 2, 4, 8) if size <= min(_LARGEST, num_ranks)]
    for chosen in product(sizes, repeat=len(axes)):
        changed: dict[str, Any] = dict(zip(axes, chosen, strict=True))
        made = base._replace(**changed)
        if fewest % prod(made.size(name) for name in INSIDE_A_HOST):
            continue
        named = tuple((name, made.size(name)) for name in ("pp", "ep", "sp", "tp") if made.size(name) > 1)
        try:
            mesh = make_mesh(MeshOptions(sizes=named or (("dp", num_ranks),), order=base.order), num_ranks)
            if mesh is not None:
                check_hosts(mesh, hosts)
        except LaunchError:
            continue
        is_given = mesh == given or (given is None and mesh is not None and mesh.dp == num_ranks)
        if mesh is not None and not is_given:
            found.append(mesh)
    return found
