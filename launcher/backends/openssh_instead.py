"""The system's `ssh` for those hosts of a job where our own SSH does not get in, or may not be used.

Our own SSH comes first: it needs no further process and raises typed errors, see docs/design/wire.md. So
settings that a distribution writes into every ssh configuration, such as GSSAPIAuthentication, change
nothing where a key is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import EXIT_HOST, LaunchError
from ..inputs.host_list import folded
from ..job.plan import NodePlan
from ..options import Options
from .channel import Login
from .openssh import NO_SSH, OpenSsh, ssh_program
from .openssh_only import OpenSshHints
from .refused_before import RefusedBefore
from .ssh_config import Target
from .ssh_login import OpenSshMay


class OpenSshInstead:
    """Chooses between our own SSH and the system's `ssh`. Once all hosts are settled `say` gets one line for
    each reason. Any thread may call.
    """

    def __init__(
        self, options: Options, *, num_hosts: int, say: Callable[[str], None], refused: RefusedBefore
    ) -> None:
        """`refused` remembers the hosts that refused our own SSH; a host that it knows is not reported
        again.
        """
        self._options = options
        self._refused = refused
        self._say = say
        self._num_unsettled = num_hosts
        self._hosts: dict[str, list[NodePlan]] = {}  # by the reason for the system's ssh
        self._ssh: OpenSsh | None = None
        self._lock = threading.Lock()

    def reach(
        self, node: NodePlan, target: Target, *, ours: Callable[[], Login], theirs: Callable[[OpenSsh], Login]
    ) -> Login:
        """Log in by `ours` or, where that fails, by `theirs`.

        Errors: LaunchError with the reasons of both
        """
        said = ""  # why the system's ssh is used, if that was not reported before
        known = self._refused.why(node.host.name)
        try:
            hints = _hints(target)
            first: LaunchError | None = None
            because = hints.only or known
            if not because or (hints.is_wish and ssh_program() is None):
                try:
                    return ours()
                except OpenSshMay as refused:
                    first, because = refused, refused.because
            login = self._by_openssh(theirs, because, first)
            if first is not None:
                self._refused.note(node.host.name, because)
            said = "" if because == known else because
            return login
        except BaseException:
            self._refused.note(node.host.name, "")
            raise
        finally:
            self.settle(node, said)

    def settle(self, node: NodePlan, because: str = "") -> None:
        """Take note that the host is reached, or never will be; `because`: why the system's ssh was used."""
        with self._lock:
            self._num_unsettled -= 1
            if because:
                self._hosts.setdefault(because, []).append(node)
            lines = self._lines() if self._num_unsettled == 0 else []
        for line in lines:
            self._say(line)

    def _lines(self) -> list[str]:
        lines = []
        for because, nodes in self._hosts.items():
            names = [node.host.name for node in sorted(nodes, key=lambda one: one.node_rank)]
            how = f"reached by the system's ssh, because {because}; --launcher=openssh begins with that"
            lines.append(f"{folded(names)}: {how}")
        return lines

    def _by_openssh(
        self, theirs: Callable[[OpenSsh], Login], because: str, first: LaunchError | None
    ) -> Login:
        program = ssh_program()
        if program is None and first is None:
            raise LaunchError(f"{because}, which needs the system's ssh, and {NO_SSH}", exit_code=EXIT_HOST)
        if program is None:
            raise LaunchError(f"{first}; the system's ssh might do, but {NO_SSH}", exit_code=EXIT_HOST)
        with self._lock:
            if self._ssh is None:
                self._ssh = OpenSsh(program, self._options.ssh, heartbeat_s=self._options.heartbeat_s)
        try:
            return theirs(self._ssh)
        except LaunchError as second:
            if first is None:
                raise LaunchError(
                    f"by the system's ssh, because {because}: {second}", exit_code=EXIT_HOST
                ) from None
            raise LaunchError(f"{first}; by the system's ssh: {second}", exit_code=EXIT_HOST) from None


def _hints(target: Target) -> OpenSshHints:
    """Return the hints of the first host on the way that has some."""
    return next((hop.openssh for hop in (*target.jumps, target) if hop.openssh.only), target.openssh)
