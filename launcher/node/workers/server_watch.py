"""A server of the job: asked whether it is healthy, and started again when the launcher says so."""

from __future__ import annotations

from ...wire.frames import Problem
from .ending import Ending
from .worker_group import WorkerGroup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...wire.frames import Frame
    from ...wire.job import NodeJob
    from ..observe.health import HealthWatch
    from ..system.lean_stdlib import Selector


PORT_WAIT_S = 5.0  # what had the port may be about to end, as a container of the attempt before


class ServerWatch:
    """Follows one server from its start. Its end does not end the agent: the launcher has it started again,
    or stopped.
    """

    def __init__(
        self,
        job: NodeJob,
        workers: WorkerGroup,
        *,
        selector: Selector,
        send: Callable[[Frame], None],
        start: Callable[[], None],
    ) -> None:
        """`start` starts the server's process. With health to be asked for, that needs a port that is free:
        the answer of another program would be taken for the server's.
        """
        self._job, self._workers = job, workers
        self._selector, self._send, self._start = selector, send, start
        self._health: HealthWatch | None = None
        self._free_by: float | None = None  # the port must be free then; None: the server was started
        self._leftovers: Ending | None = None  # a server has ended, and starts again when this is over
        self._not_before = 0.0  # when it may start again

    def begin(self, now: float) -> None:
        """Start the server once its port is free."""
        self._free_by = now + PORT_WAIT_S
        self._start_if_free(now)

    def _start_if_free(self, now: float) -> None:
        if self._free_by is None:
            return
        if self._job.health is not None and self._is_port_taken(*self._job.health):
            if now >= self._free_by:
                self._free_by = None
                self._send(Problem(_taken(self._job.health[1]), 1))
            return
        self._free_by = None
        self._start()
        self._ask_for_health()

    def _is_port_taken(self, host: str, port: str, path: str) -> bool:
        from ..observe.health import is_taken

        return is_taken(host, int(port))

    def _ask_for_health(self) -> None:
        if self._job.health is None:
            return
        from ..observe.health import HealthWatch

        host, port, path = self._job.health
        self._health = HealthWatch(
            host,
            int(port),
            path,
            rank=self._job.ranks[0].rank,
            selector=self._selector,
            send=self._send,
        )

    def start_again(self, not_before: float) -> None:
        """End what the server left running, and then start it, but not before this time."""
        if self._workers.is_told and self._leftovers is None:
            self._not_before = not_before
            self._leftovers = Ending(self._workers)
            self._leftovers.begin_with_left_over()

    def look(self, now: float) -> None:
        """Do what is due."""
        if self._leftovers is not None:
            if not self._leftovers.go_on(now) or now < self._not_before:
                return
            self._leftovers = None
            self._workers.forget()
            self.begin(now)
        elif self._free_by is not None:
            self._start_if_free(now)
        elif self._health is not None and self._workers.is_ended:
            self.end()
        elif self._health is not None:
            self._health.look(now)

    def end(self) -> None:
        """Ask no more, and start nothing."""
        self._free_by = None
        if self._health is not None:
            self._health.end()
            self._health = None


def _taken(port: str) -> str:
    return (
        f"port {port}, at which --role_health asks, is in use before the server is started, so another "
        f"program would answer for it; end that program (`ss -ltnp 'sport = :{port}'` there names it), or "
        "give the server another port"
    )
