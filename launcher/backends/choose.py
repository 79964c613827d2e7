"""How each host of a plan is reached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..job.gateways import Group
from ..job.plan import NodePlan
from ..options import Options
from ..options.backend import OPENSSH, PDSH
from .bootstrap import agent_python
from .channel import Channel
from .lean_paramiko import lean_paramiko
from .open_files import ensure_open_files
from .ssh_dial import EarlyDials


class Access(NamedTuple):
    """How a job reaches its hosts.

    `window`: how many may be on their way at the same time; `summary` is for --timings.
    """

    connect: Callable[[NodePlan], Channel]
    window: int
    summary: Callable[[], str] = lambda: ""
    close: Callable[[], None] = lambda: None  # ends what was begun for hosts that were not connected


def choose_access(
    options: Options, nodes: Sequence[NodePlan], groups: Sequence[Group], *, say: Callable[[str], None]
) -> Access:
    """All hosts from here, or, with groups, most of them through gateways."""
    window = options.start.window
    if not groups:
        return _direct_access(options, nodes, window=window, num_early=window, say=say)
    from .ssh_config import Configuration  # as below

    configuration = Configuration(options.ssh)
    targets = {node.node_rank: configuration.resolve(node.host) for node in nodes if not node.is_local}
    ensure_open_files(
        min(window, len(nodes)) + len(groups) + len(nodes) - sum(len(one.children) for one in groups)
    )
    with lean_paramiko():
        from .ssh_tree import SshTree

    tree = SshTree(groups, targets, window=window, heartbeat_s=options.heartbeat_s, say=say)
    local = direct_connect(options, (), say=say)
    # The tree has a window of its own for connections from here: a host that waits for its
    # gateway must not fill it.
    return Access(
        connect=lambda node: local(node) if node.is_local else tree.connect(node),
        window=len(nodes),
        summary=tree.summary,
    )


def direct_connect(
    options: Options, nodes: Sequence[NodePlan], *, say: Callable[[str], None]
) -> Callable[[NodePlan], Channel]:
    """How to reach each host. SSH settings are resolved before anything is connected,
    so mistakes there come first.
    """
    return _direct_access(options, nodes, window=len(nodes), num_early=0, say=say).connect


def _direct_access(
    options: Options,
    nodes: Sequence[NodePlan],
    *,
    window: int,
    num_early: int,
    say: Callable[[str], None],
) -> Access:
    """The same; `num_early` connections are begun here already, and `close` must be called then."""
    others = [node for node in nodes if not node.is_local]
    ensure_open_files(len(others))
    access = Access(connect=_connect_nobody, window=window)
    if others and options.backend.launcher == PDSH:
        from .pdsh import Pdsh

        pdsh = Pdsh(others, launcher_args=options.backend.launcher_args, ssh=options.ssh)
        access = access._replace(connect=pdsh.connect)
    elif others and options.backend.launcher == OPENSSH:
        access = access._replace(connect=_by_openssh(options))
    elif others:
        connect_others, close = _by_ssh(others, options, num_early=num_early, say=say)
        access = access._replace(connect=connect_others, close=close)

    def connect(node: NodePlan) -> Channel:
        if node.is_local:
            from .local import LOCAL_STOP_MARGIN_S, LocalChannel

            return LocalChannel(
                end_within_s=options.kill_grace_s + LOCAL_STOP_MARGIN_S,
                takes_stdin=node.stdin_rank is not None,
            )
        return access.connect(node)

    return access._replace(connect=connect)


def _connect_nobody(node: NodePlan) -> Channel:
    raise AssertionError(f"{node.host.name} is to be connected, and was not among the nodes")


def _by_openssh(options: Options) -> Callable[[NodePlan], Channel]:
    """What connects each host by an `ssh` of its own."""
    from .openssh import ConnectTimeouts, OpenSsh

    ssh = OpenSsh(
        options.ssh,
        launcher_args=options.backend.launcher_args,
        heartbeat_s=options.heartbeat_s,
        needed_by="--launcher=openssh",
    )
    timeouts = ConnectTimeouts(options.ssh)
    return lambda node: ssh.connect(node, timeouts.of(node.host))


def _by_ssh(
    nodes: Sequence[NodePlan], options: Options, *, num_early: int, say: Callable[[str], None]
) -> tuple[Callable[[NodePlan], Channel], Callable[[], None]]:
    """What connects them, and what gives up those that were begun early and are not needed."""
    from .ssh_config import Configuration  # here and below: a local job does not load paramiko (50 ms)

    configuration = Configuration(options.ssh)
    targets = {node.node_rank: configuration.resolve(node.host) for node in nodes}
    is_loaded = f"{__package__}.ssh" in sys.modules
    early = EarlyDials({} if is_loaded else dict(list(targets.items())[:num_early]))
    with lean_paramiko():
        from .openssh_instead import OpenSshInstead
        from .ssh import SshChannel, SshConnection
        from .ssh_login import SshFiles
    files = SshFiles()
    instead = OpenSshInstead(options, num_hosts=len(nodes), say=say)

    def connect(node: NodePlan) -> Channel:
        target = targets[node.node_rank]

        def by_our_own() -> Channel:
            connection = SshConnection(target, files, early.take(node.node_rank))
            return SshChannel(connection, python=agent_python(node.host))

        return instead.connect(node, target, by_our_own)

    return connect, early.close
