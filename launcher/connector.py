"""How each host of a plan is reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .bootstrap import agent_python
from .channel import Channel
from .options import Options
from .plan import NodePlan
from .tree import Group

LOCAL_STOP_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How a job reaches its hosts. `window`: how many may be on their way at the same time; `summary` is for --timings."""

    connect: Callable[[NodePlan], Channel]
    window: int
    summary: Callable[[], str] = lambda: ""


def ways(
    options: Options, nodes: Sequence[NodePlan], groups: Sequence[Group], *, say: Callable[[str], None]
) -> Ways:
    """All hosts from here, or, with groups, most of them through gateways."""
    if not groups:
        return Ways(connect=connector(options, nodes), window=options.start.window)
    from .ssh_config import resolve

    targets = {node.node_rank: resolve(node.host, options.ssh) for node in nodes if not node.is_local}
    from .backends.ssh_tree import SshTree  # after resolve, which knows how to load paramiko

    tree = SshTree(groups, targets, window=options.start.window, heartbeat_s=options.heartbeat_s, say=say)
    local = connector(options, ())
    # The tree has a window of its own for connections from here: a host that waits for its gateway must not fill it.
    return Ways(
        connect=lambda node: local(node) if node.is_local else tree.connect(node),
        window=len(nodes),
        summary=tree.summary,
    )


def connector(options: Options, nodes: Sequence[NodePlan]) -> Callable[[NodePlan], Channel]:
    """How to reach each host. SSH settings are resolved before anything is connected, so mistakes there come first."""
    targets = {}
    others = [node for node in nodes if not node.is_local]
    if others and options.launcher == "pdsh":
        from .backends.pdsh import Pdsh

        pdsh = Pdsh(others, launcher_args=options.backend.launcher_args, ssh=options.ssh)
    elif others:
        from .ssh_config import resolve  # here and below: a local job does not load paramiko (40 ms)

        targets = {node.node_rank: resolve(node.host, options.ssh) for node in others}
        from .backends.ssh import (
            SshChannel,
            SshConnection,
            SshFiles,
        )  # after resolve, which knows how to load paramiko

        files = SshFiles()

    def connect(node: NodePlan) -> Channel:
        if node.is_local:
            from .backends.local import LocalChannel

            return LocalChannel(end_within_s=options.kill_grace_s + LOCAL_STOP_MARGIN_S)
        if not targets:
            return pdsh.connect(node)
        connection = SshConnection(targets[node.node_rank], files)
        return SshChannel(connection, python=agent_python(node.host))

    return connect
