"""How each host of a plan is reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .bootstrap import agent_python
from .channel import Channel
from .options import Options
from .plan import NodePlan

LOCAL_STOP_MARGIN_S = 10.0


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
        from .backends.ssh import SshChannel, SshFiles  # after resolve, which knows how to load paramiko

        files = SshFiles()

    def connect(node: NodePlan) -> Channel:
        if node.is_local:
            from .backends.local import LocalChannel

            return LocalChannel(end_within_s=options.kill_grace_s + LOCAL_STOP_MARGIN_S)
        if not targets:
            return pdsh.connect(node)
        return SshChannel(targets[node.node_rank], files, python=agent_python(node.host))

    return connect
