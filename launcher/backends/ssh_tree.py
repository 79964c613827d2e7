"""SSH in two levels: gateways are reached from here, and the hosts behind each through a
relay that runs on it.

The relay is a second channel of the connection to the gateway, and starts the gateway's own `ssh` for each
host: its keys, its known_hosts and its configuration decide. A host that is not reached so is connected from
here, as without a tree.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence

from ..errors import EXIT_HOST, LaunchError
from ..job.gateways import Group, is_loopback
from ..job.plan import NodePlan
from ..wording import count
from .bootstrap import agent_python, relayed_command
from .channel import Channel
from .relayed import RelayedChannel, RelayStreams
from .ssh import SshChannel, SshConnection
from .ssh_config import Target
from .ssh_login import SshFiles

START_MARGIN_S = 20.0  # from a login to the first word of a Python: a login shell


class SshTree:
    """Connects the hosts of one job.

    What could not be reached as planned is told to `say`, in one line for a group.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        targets: Mapping[int, Target],
        *,
        window: int,
        heartbeat_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`targets` by node_rank. `window` counts the connections that are being made from
        here at the same time.
        """
        self._heartbeat_s = heartbeat_s
        self._files = SshFiles()
        self._targets = targets
        self._window = threading.BoundedSemaphore(window)
        self._gateways: dict[int, _Gateway] = {}
        for group in groups:
            target = targets[group.gateway.node_rank]
            gateway = _Gateway(group, target, files=self._files, window=self._window, say=say)
            for node in (group.gateway, *group.children):
                self._gateways[node.node_rank] = gateway

    def connect(self, node: NodePlan) -> Channel:
        """Errors: LaunchError if the host cannot be reached, from here either."""
        gateway = self._gateways.get(node.node_rank)
        if gateway is not None and gateway.node.node_rank == node.node_rank:
            return gateway.connect()
        target = self._targets[node.node_rank]
        if gateway is not None:
            try:
                command = ssh_command(
                    target,
                    python=agent_python(node.host),
                    prefix=node.host.exec_prefix or (),
                    heartbeat_s=self._heartbeat_s,
                )
                channel = gateway.connect_child(target, command)
            except LaunchError as error:
                gateway.settle(node, str(error))
            else:
                gateway.settle(node, "")
                return channel
        with self._window:
            return SshChannel(
                SshConnection(target, self._files),
                python=agent_python(node.host),
                prefix=node.host.exec_prefix or (),
            )

    def summary(self) -> str:
        """How many hosts were reached in which way."""
        gateways = {id(one): one for one in self._gateways.values()}.values()
        num_through = sum(one.num_through for one in gateways)
        num_used = sum(one.num_through > 0 for one in gateways)
        return f"{count(num_through, 'host')} reached through {count(num_used, 'gateway')}"


class _Gateway:
    """One gateway: a host of the job, and the way to its children. The first caller makes the connection."""

    def __init__(
        self,
        group: Group,
        target: Target,
        *,
        files: SshFiles,
        window: threading.BoundedSemaphore,
        say: Callable[[str], None],
    ) -> None:
        self.node = group.gateway
        self.num_through = 0
        self._target = target
        self._files = files
        self._window = window
        self._say = say
        self._making = threading.Lock()  # held while something is made
        self._connection: SshConnection | None = None
        self._relay: RelayStreams | None = None
        self._error = ""  # why there is no connection, or no relay
        self._agent: _AgentChannel | None = None
        self._lock = threading.Lock()
        self._num_open = 0  # children, those that are being connected included
        self._is_agent_done = False
        self._num_unsettled = len(group.children)
        self._failed: list[tuple[str, str]] = []  # children that are not behind it, and why

    def connect(self) -> Channel:
        """The stream to its own agent."""
        try:
            with self._making:
                connection = self._connected()
            self._agent = _AgentChannel(self, connection)
        except BaseException:
            self.agent_is_done()
            raise
        return self._agent

    def connect_child(self, target: Target, command: tuple[str, ...]) -> RelayedChannel:
        """Errors: LaunchError if it is not reached from the gateway."""
        with self._lock:
            self._num_open += 1
        try:
            if is_loopback(target.address):
                raise LaunchError(f"{target.address} is another host there", exit_code=EXIT_HOST)
            relay = self._relayed()
        except BaseException:
            self.child_is_done()
            raise
        timeout_s = target.connect_timeout_s + START_MARGIN_S
        return relay.open(command, timeout_s=timeout_s, on_close=self.child_is_done)

    def settle(self, node: NodePlan, problem: str) -> None:
        """It is known whether that child is behind us; after the last one, say which are not."""
        with self._lock:
            self._num_unsettled -= 1
            if problem:
                self._failed.append((node.host.name, problem))
            else:
                self.num_through += 1
            is_last = self._num_unsettled == 0
        if is_last and self._failed:
            self._say(describe_failed(self.node.host.name, self._failed, is_gateway_lost=bool(self._error)))

    def agent_is_done(self) -> None:
        """The connection stays while there are children."""
        with self._lock:
            was_done, self._is_agent_done = self._is_agent_done, True
        if was_done:
            return
        if self._relay is not None:
            self._relay.give_up()
        self._close_if_done()
        if self._connection is not None:
            self._connection.release()

    def child_is_done(self) -> None:
        with self._lock:
            self._num_open -= 1
        self._close_if_done()

    def why_relay_ended(self) -> str:
        return self._relay.why_ended if self._relay is not None else ""

    def _close_if_done(self) -> None:
        with self._lock:
            relay = self._relay if self._is_agent_done and self._num_open == 0 else None
        if relay is not None:
            relay.close()

    def _connected(self) -> SshConnection:
        if self._error and self._connection is None:
            raise LaunchError(self._error, exit_code=EXIT_HOST)
        if self._connection is None:
            try:
                with self._window:
                    self._connection = SshConnection(self._target, self._files)
                self._connection.hold()  # until agent_is_done
            except LaunchError as error:
                self._error = str(error)
                raise
        return self._connection

    def _relayed(self) -> RelayStreams:
        with self._making:
            if self._error:
                raise LaunchError(self._error, exit_code=EXIT_HOST)
            if self._relay is None:
                connection = self._connected()
                try:
                    stream = SshChannel(connection, python=agent_python(self.node.host))
                    self._relay = RelayStreams(stream, gateway=self.node.host.name, on_end=self._relay_ended)
                except (LaunchError, OSError) as error:
                    self._error = str(error)
                    raise LaunchError(self._error, exit_code=EXIT_HOST) from None
            return self._relay

    def _relay_ended(self) -> None:
        """With hosts behind it: then this host has failed."""
        if self._agent is not None and self.num_through:
            self._agent.hang_up()


class _AgentChannel(SshChannel):
    """The gateway's own agent; lost with the relay."""

    def __init__(self, gateway: _Gateway, connection: SshConnection) -> None:
        host = gateway.node.host
        super().__init__(connection, python=agent_python(host), prefix=host.exec_prefix or ())
        self._gateway = gateway

    def read(self) -> bytes:
        data = super().read()
        why = "" if data or self._is_closed else self._gateway.why_relay_ended()
        if why and self.is_connected:
            raise LaunchError(f"the relay to the hosts behind it ended: {why}", exit_code=EXIT_HOST)
        return data

    def close(self) -> None:
        super().close()
        self._gateway.agent_is_done()


def ssh_command(
    target: Target, *, python: str, heartbeat_s: float, prefix: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """What a gateway runs to start an agent on another host.

    It asks no questions, and shares and forwards nothing.

    It ends a while after the agent does if it hears nothing: else it would stay on a gateway that is cut off.
    """
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, math.ceil(target.connect_timeout_s))),
        "ServerAliveInterval": str(max(1, math.ceil(heartbeat_s / 2))),
        "ServerAliveCountMax": "3",
        "ControlMaster": "no",
        "ControlPath": "none",
        "ClearAllForwardings": "yes",
    }
    words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    where = ("-p", str(target.port), "-l", target.user, "--", target.address)
    return ("ssh", "-T", "-a", "-x", *words, *where, relayed_command(python, prefix))


def describe_failed(gateway: str, failed: Sequence[tuple[str, str]], *, is_gateway_lost: bool) -> str:
    """One line for the hosts of a group that are not reached through their gateway;
    the reason is that of the first.
    """
    (first, reason), more = failed[0], len(failed) - 1
    what = "cannot be a gateway"
    if not is_gateway_lost:
        what = f"cannot reach {first}" + (f" and {more} more" if more else "")
    directly = f"{count(len(failed), 'host')} {'is' if len(failed) == 1 else 'are'} connected directly"
    return f"{gateway}: {what} ({reason.rstrip('.')}); {directly}"
