"""Chooses how each host of a plan is reached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import EXIT_HOST, LaunchError
from ..job.gateways import Group
from ..job.plan import NodePlan
from ..options import Options
from ..options.backend import OPENSSH
from .bootstrap import agent_python
from .channel import Channel, Login, Ways
from .lean_paramiko import lean_paramiko
from .open_files import NUM_PER_HOST, NUM_PER_PROCESS, ensure_open_files
from .refused_before import RefusedBefore
from .ssh_dial import EarlyDials

if TYPE_CHECKING:  # a local job must not load these modules
    from .ssh_config import Target


class HostAccess(NamedTuple):
    """How a job reaches its hosts.

    `window`: the most connections that may be begun at the same time; `summary` is for --timings.
    """

    connect: Callable[[NodePlan], Channel]
    window: int
    summary: Callable[[], str] = lambda: ""
    close: Callable[[], None] = lambda: None  # ends connections that were begun, but not used


def choose_access(
    options: Options,
    nodes: Sequence[NodePlan],
    groups: Sequence[Group],
    *,
    say: Callable[[str], None],
    refused: RefusedBefore | None = None,
) -> HostAccess:
    """Reach all hosts from here, or, with groups, most of them through gateways.

    `refused`: the memory that tells the starts of this command which hosts need the system's ssh.
    """
    window = options.start.window
    if not groups:
        return _direct_access(options, nodes, window=window, num_early=window, say=say, refused=refused)
    others = [node for node in nodes if not node.is_local]
    targets = _targets(others, options)
    ensure_open_files(
        min(window, len(nodes)) + len(groups) + len(nodes) - sum(len(one.children) for one in groups),
        num_per_host=_files_per_host(options),
    )
    if options.backend.launcher == OPENSSH:
        ways = _by_openssh(options)
    else:
        ways, _ = _by_ssh(targets, options, num_early=0, say=say, refused=refused)
    from .ssh_tree import SshTree

    tree = SshTree(groups, targets, ways, window=window, heartbeat_s=options.heartbeat_s, say=say)
    local = direct_connect(options, (), say=say)
    # The tree has a window of its own for connections from here: a host that waits for its
    # gateway must not fill it.
    return HostAccess(
        connect=lambda node: local(node) if node.is_local else tree.connect(node),
        window=len(nodes),
        summary=tree.summary,
    )


def direct_connect(
    options: Options,
    nodes: Sequence[NodePlan],
    *,
    say: Callable[[str], None],
    refused: RefusedBefore | None = None,
) -> Callable[[NodePlan], Channel]:
    """Reach each host directly. SSH settings are resolved before anything is connected, so mistakes there
    come first. `refused`: as for choose_access.
    """
    return _direct_access(options, nodes, window=len(nodes), num_early=0, say=say, refused=refused).connect


def _direct_access(
    options: Options,
    nodes: Sequence[NodePlan],
    *,
    window: int,
    num_early: int,
    say: Callable[[str], None],
    refused: RefusedBefore | None,
) -> HostAccess:
    """Reach each host directly; `num_early` connections are begun here already, so the caller must call
    `close`.
    """
    others = [node for node in nodes if not node.is_local]
    ensure_open_files(len(others), num_per_host=_files_per_host(options))
    access = HostAccess(connect=_connect_nobody, window=window)
    if others and options.backend.launcher == OPENSSH:
        access = access._replace(connect=_by_openssh(options).connect)
    elif others:
        targets = _targets(others, options)
        ways, close = _by_ssh(targets, options, num_early=num_early, say=say, refused=refused)
        access = access._replace(connect=ways.connect, close=close)

    def connect(node: NodePlan) -> Channel:
        if node.is_local:
            from .local import local_channel

            return local_channel(node, kill_grace_s=options.kill_grace_s)
        return access.connect(node)

    return access._replace(connect=connect)


def _files_per_host(options: Options) -> int:
    return NUM_PER_PROCESS if options.backend.launcher == OPENSSH else NUM_PER_HOST


def _connect_nobody(node: NodePlan) -> Channel:
    raise AssertionError(f"{node.host.name} is to be connected, and was not among the nodes")


def _targets(nodes: Sequence[NodePlan], options: Options) -> dict[int, Target]:
    """Return the targets by node_rank."""
    from .ssh_config import Configuration

    configuration = Configuration(options.ssh)
    return {node.node_rank: configuration.resolve(node.host) for node in nodes}


def _by_openssh(options: Options) -> Ways:
    """Reach each host by an `ssh` of its own."""
    from .openssh import NO_SSH, OpenSsh, OpenSshLogin, ssh_program

    program = ssh_program()
    if program is None:
        raise LaunchError(
            f"--launcher=openssh: {NO_SSH}, or use --launcher=ssh, which needs no other program",
            exit_code=EXIT_HOST,
        )
    ssh = OpenSsh(
        program,
        options.ssh,
        launcher_args=options.backend.launcher_args,
        heartbeat_s=options.heartbeat_s,
    )
    timeout_s = options.ssh.connect_timeout_s
    return Ways(
        connect=lambda node: ssh.connect(node, timeout_s, node.host.exec_prefix or ()),
        log_in=lambda node: OpenSshLogin(ssh, node, timeout_s),
    )


def _by_ssh(
    targets: Mapping[int, Target],
    options: Options,
    *,
    num_early: int,
    say: Callable[[str], None],
    refused: RefusedBefore | None,
) -> tuple[Ways, Callable[[], None]]:
    """Reach hosts by our own SSH; the second result is a function that gives up connections begun but not
    used.
    """
    is_loaded = f"{__package__}.ssh" in sys.modules
    early = EarlyDials({} if is_loaded else dict(list(targets.items())[:num_early]))
    with lean_paramiko():
        from .openssh import OpenSsh, OpenSshLogin
        from .openssh_instead import OpenSshInstead
        from .ssh import SshConnection
        from .ssh_login import SshFiles

    files = SshFiles(say)
    refused = RefusedBefore() if refused is None else refused
    instead = OpenSshInstead(options, num_hosts=len(targets), say=say, refused=refused)

    def log_in(node: NodePlan) -> Login:
        target = targets[node.node_rank]

        def ours() -> Login:
            return SshConnection(target, files, early.take(node.node_rank))

        def theirs(ssh: OpenSsh) -> Login:
            return OpenSshLogin(ssh, node, target.connect_timeout_s)

        return instead.reach(node, target, ours=ours, theirs=theirs)

    def connect(node: NodePlan) -> Channel:
        return log_in(node).open(agent_python(node.host), node.host.exec_prefix or ())

    return Ways(connect, log_in, is_reached=instead.settle), early.close
