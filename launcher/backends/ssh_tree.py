"""SSH in two levels: gateways are reached from here, and the hosts behind each through a
relay that runs on it.

The relay is a second channel of the connection to the gateway, and starts the gateway's own `ssh` for each
host: the gateway's keys, known_hosts and configuration decide. A host that cannot be reached in this way is
connected from here, as without a tree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ..errors import EXIT_HOST, LaunchError
from ..job.gateways import Group, is_loopback
from ..job.plan import NodePlan
from ..wording import count
from .bootstrap import agent_python, relayed_command
from .channel import Channel, Login, LoginStream, Ways
from .openssh import settings
from .relayed import RelayedChannel, RelayStreams
from .ssh_config import Target

START_MARGIN_S = 20.0  # from a login to the first word of a Python: a login shell


class SshTree:
    """Connects the hosts of one job.

    Hosts that could not be reached as planned are reported to `say`, in one line for a group.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        targets: Mapping[int, Target],
        ways: Ways,
        *,
        window: int,
        heartbeat_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`targets` by node_rank. `window` limits how many connections are made from here at a time."""
        self._heartbeat_s = heartbeat_s
        self._targets = targets
        self._ways = ways
        self._window = threading.BoundedSemaphore(window)
        self._gateways: dict[int, _Gateway] = {}
        for group in groups:
            gateway = _Gateway(group, ways.log_in, window=self._window, say=say)
            for node in (group.gateway, *group.children):
                self._gateways[node.node_rank] = gateway

    def connect(self, node: NodePlan) -> Channel:
        """Connect to a host. Errors: LaunchError if it can be reached neither in the tree nor from here."""
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
                self._ways.is_reached(node)
                return channel
        with self._window:
            return self._ways.connect(node)

    def summary(self) -> str:
        """Return how many hosts were reached in which way."""
        gateways = {id(one): one for one in self._gateways.values()}.values()
        num_through = sum(one.num_through for one in gateways)
        num_used = sum(one.num_through > 0 for one in gateways)
        return f"{count(num_through, 'host')} reached through {count(num_used, 'gateway')}"


class _Gateway:
    """One gateway: a host of the job, and the way to its children. The first caller makes the connection."""

    def __init__(
        self,
        group: Group,
        log_in: Callable[[NodePlan], Login],
        *,
        window: threading.BoundedSemaphore,
        say: Callable[[str], None],
    ) -> None:
        self.node = group.gateway
        self.num_through = 0
        self._log_in = log_in
        self._window = window
        self._say = say
        self._making = threading.Lock()  # held while a connection is made
        self._login: Login | None = None
        self._relay: RelayStreams | None = None
        self._error = ""  # why there is no connection, or no relay
        self._agent: _AgentChannel | None = None
        self._lock = threading.Lock()
        self._num_open = 0  # number of children that are connected or being connected
        self._is_agent_done = False
        self._num_unsettled = len(group.children)
        self._failed: list[tuple[str, str]] = []  # children not reached through this gateway, and why

    def connect(self) -> Channel:
        """Return the stream to its own agent."""
        try:
            with self._making:
                login = self._logged_in()
            host = self.node.host
            self._agent = _AgentChannel(self, login.open(agent_python(host), host.exec_prefix or ()))
        except BaseException:
            self.agent_is_done()
            raise
        return self._agent

    def connect_child(self, target: Target, command: tuple[str, ...]) -> RelayedChannel:
        """Connect to a child. Errors: LaunchError if it is not reached from the gateway."""
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
        """Note whether the child was reached through this gateway; after the last child, report those that
        were not.
        """
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
        """Give up the gateway's own agent; the connection stays while there are children."""
        with self._lock:
            was_done, self._is_agent_done = self._is_agent_done, True
        if was_done:
            return
        if self._relay is not None:
            self._relay.give_up()
        self._close_if_done()
        if self._login is not None:
            self._login.release()

    def child_is_done(self) -> None:
        with self._lock:
            self._num_open -= 1
        self._close_if_done()

    def why_relay_ended(self) -> str:
        """Return the reason; empty while the relay goes on, and if no host was reached through it."""
        return self._relay.why_ended if self._relay is not None and self.num_through else ""

    def _close_if_done(self) -> None:
        with self._lock:
            relay = self._relay if self._is_agent_done and self._num_open == 0 else None
        if relay is not None:
            relay.close()

    def _logged_in(self) -> Login:
        if self._error and self._login is None:
            raise LaunchError(self._error, exit_code=EXIT_HOST)
        if self._login is None:
            try:
                with self._window:
                    self._login = self._log_in(self.node)
                self._login.hold()  # keep the connection until agent_is_done()
            except LaunchError as error:
                self._error = str(error)
                raise
        return self._login

    def _relayed(self) -> RelayStreams:
        with self._making:
            if self._error:
                raise LaunchError(self._error, exit_code=EXIT_HOST)
            if self._relay is None:
                login = self._logged_in()
                try:
                    stream = login.open(agent_python(self.node.host))
                except (LaunchError, OSError) as error:
                    self._error = str(error)
                    raise LaunchError(self._error, exit_code=EXIT_HOST) from None
                try:
                    self._relay = RelayStreams(stream, gateway=self.node.host.name, on_end=self._relay_ended)
                except OSError:
                    self._error = _why_no_relay(stream)
                    stream.close()
                    raise LaunchError(self._error, exit_code=EXIT_HOST) from None
            return self._relay

    def _relay_ended(self) -> None:
        """Note that the relay ended; if hosts are still connected through it, the gateway has failed."""
        if self._agent is not None and self.num_through:
            self._agent.hang_up()


class _AgentChannel:
    """The channel to the gateway's own agent. If the relay is lost, the agent counts as lost, too."""

    def __init__(self, gateway: _Gateway, stream: LoginStream) -> None:
        self.local_address = stream.local_address
        self.write = stream.write
        self.error_text = stream.error_text
        self.exit_status = stream.exit_status
        self.hang_up = stream.hang_up
        self._stream = stream
        self._gateway = gateway
        self._is_closed = False

    def read(self) -> bytes:
        data = self._stream.read()
        why = "" if data or self._is_closed else self._gateway.why_relay_ended()
        if why and self._stream.is_connected:
            raise LaunchError(f"the relay to the hosts behind it ended: {why}", exit_code=EXIT_HOST)
        return data

    def close(self) -> None:
        self._is_closed = True
        self._stream.close()
        self._gateway.agent_is_done()


def _why_no_relay(stream: LoginStream) -> str:
    """Return why a login ended before the relay could be sent: a login script may have ended it."""
    status = stream.exit_status()
    said = [line.strip() for line in stream.error_text().splitlines() if line.strip()]
    how = "the connection ended" if status is None else f"the login ended with status {status}"
    return f"{how} and said nothing" if not said else f"{how}, and its last words are {said[-1]!r}"


def ssh_command(
    target: Target, *, python: str, heartbeat_s: float, prefix: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the gateway's command to start an agent on another host: an ssh that shares no connection of
    the gateway's, and that ends if the gateway is cut off from the host.
    """
    told = {
        **settings(connect_timeout_s=target.connect_timeout_s, heartbeat_s=heartbeat_s),
        "ControlPath": "none",
        "StrictHostKeyChecking": "yes",  # the gateway's configuration may say `no`, and we cannot look
    }
    words = [word for name, value in told.items() for word in ("-o", f"{name}={value}")]
    where = ("-p", str(target.port), "-l", target.user, "--", target.address)
    return ("ssh", "-T", "-a", "-x", *words, *where, relayed_command(python, prefix))


def describe_failed(gateway: str, failed: Sequence[tuple[str, str]], *, is_gateway_lost: bool) -> str:
    """Return one line for the hosts of a group that are not reached through their gateway, with the reason of
    the first.
    """
    (first, reason), more = failed[0], len(failed) - 1
    what = "cannot be a gateway"
    if not is_gateway_lost:
        what = f"cannot reach {first}" + (f" and {more} more" if more else "")
    directly = f"{count(len(failed), 'host')} {'is' if len(failed) == 1 else 'are'} connected directly"
    return f"{gateway}: {what} ({reason.rstrip('.')}); {directly}"
