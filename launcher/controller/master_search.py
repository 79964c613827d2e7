"""The address of node 0 that all others reach, and that of a server's node, found by trying.

Node 0's agent listens on the master port for a moment, the other agents connect. The address that
endpoint.py derives is tried first, which takes one round trip. Only if a node cannot reach it are node 0's
other addresses tried.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..job.plan import NodePlan, Plan
from ..wire.frames import Frame, Listen, Listening, Reach, Reached

REACH_TIMEOUT_S = 5.0
MAX_CANDIDATES = 16


class MasterSearch:
    """One search. It sends frames through `send(node_rank, frame)`, and `take` gets the answers.

    With `server`, the node of a server, it is for the address at which the trainers reach that node, tried at
    the port at which the server will listen, if that is known. No failure comes of it, only warnings.
    """

    def __init__(
        self, plan: Plan, send: Callable[[int, Frame], None], *, server: NodePlan | None = None
    ) -> None:
        self._plan = plan
        self._send = send
        self._server = server
        self._first = plan.nodes[0] if server is None else server
        self._given = plan.master.address if server is None else None
        self._token = secrets.token_hex(16)
        self._peers = tuple(node.node_rank for node in plan.nodes if node is not self._first)
        self._listening: Listening | None = None
        self._prepared: set[int] = set()  # node ranks that can be asked
        self.is_begun = False
        self._names_of_first: tuple[str, ...] = ()
        self._more: list[str] = []
        self._candidates: list[str] = []  # candidates of this round
        # Problems of the nodes with the first candidate, by node_rank
        self._first_problems: dict[int, str] = {}
        self._problems: dict[int, list[str]] = {}  # one text for each candidate of this round, by node_rank
        self._unanswered: set[int] = set()  # node ranks that were asked in this round
        self.is_over = not self.is_needed
        self.address = ""
        # node_rank of each node at fault, and a message
        self.failures: tuple[tuple[int, str], ...] = ()
        self.notes: tuple[str, ...] = ()
        self.warnings: tuple[str, ...] = ()

    @property
    def _port(self) -> int:
        return self._listening.port if self._listening is not None else 0

    @property
    def is_needed(self) -> bool:
        """Tell whether another machine has to reach node 0."""
        nodes = (self._first, *(self._plan.nodes[rank] for rank in self._peers))
        return len(nodes) > 1 and not all(node.is_local for node in nodes)

    def listen(self) -> None:
        """Let node 0 listen as soon as its port is chosen; a server's node chooses one of its own for 0."""
        health = None if self._server is None else self._plan.role_of(self._server).health
        port = 0 if health is None or health.host else health.port
        if self.is_needed:
            self._send(self._first.node_rank, Listen(port, self._token))

    def begin(self, default: str, *, more: Iterable[str] = ()) -> None:
        """Try `default`; `more` are further names of node 0, tried after its own addresses."""
        self.address = default
        self.is_begun = True
        if self.is_over:
            return
        self._names_of_first = tuple(more)
        if self._listening is not None:
            self._try_default(self._listening)

    def prepare(self, node_rank: int) -> None:
        """Take note that the node is prepared, so that it can be asked to try."""
        self._prepared.add(node_rank)
        if node_rank in self._unanswered:
            self._ask(node_rank)

    def is_answered(self, node_rank: int) -> bool:
        """Tell whether that node has answered in this round; there may be a second one."""
        return self._listening is not None and node_rank not in self._unanswered

    def take(self, node_rank: int, frame: Listening | Reached) -> None:
        """Take an answer of node 0 that it listens, or of a peer that tried. Answers come in any order."""
        is_asked = self._listening is None
        if isinstance(frame, Reached):
            is_asked = node_rank in self._unanswered and node_rank in self._prepared
        if not is_asked:  # nothing was asked, or the answer came twice
            return
        if isinstance(frame, Reached):
            unanswered = ["was not tried"] * len(self._candidates)
            self._problems[node_rank] = [*frame.problems, *unanswered][: len(self._candidates)]
            self._unanswered.discard(node_rank)
            if not self._unanswered:
                self._judge()
            return
        self._listening = frame
        if frame.problem and self._server is not None:
            self.is_over = True
            self.warnings = (
                f"{self._first.host.name}: {frame.problem} before {self._server.role} is started there, and "
                "it cannot listen on it, too; end what does",
            )
        elif frame.problem:
            self.is_over = True
            self.failures = ((0, f"{frame.problem}, though it was free just now; start the job again"),)
        elif self.is_begun:
            self._try_default(frame)

    def lose_first(self) -> None:
        """Give up node 0. If it does not listen yet, the other nodes will not be asked to try."""
        if self._listening is None:
            self.is_over = True

    def _try_default(self, listening: Listening) -> None:
        own, names = listening.addresses, self._names_of_first
        self._more = [] if self._given is not None else candidates_of(self.address, own, names)[1:]
        self._try([self.address])

    def _try(self, candidates: list[str]) -> None:
        self.is_over = False
        self._candidates = candidates
        self._problems = {}
        self._unanswered = set(self._peers)
        for node_rank in self._peers:
            if node_rank in self._prepared:
                self._ask(node_rank)

    def _ask(self, node_rank: int) -> None:
        self._send(node_rank, Reach(self._candidates, self._port, self._token, REACH_TIMEOUT_S))

    def _judge(self) -> None:
        """When all have answered, decide: the address is found, further addresses must be tried, or some
        node reaches none.
        """
        self.is_over = True
        found = first_reached(self._candidates, self._problems)
        is_first_round = not self._first_problems
        if is_first_round:
            default = self.address
            self._first_problems = {rank: one for rank, (one, *_) in self._problems.items() if one}
            if found is not None:
                return
            if self._given is not None:
                self.warnings = tuple(
                    f"--master_addr={default}: from {self._names(ranks)} it {problem} (port {self._port})"
                    for problem, ranks in _grouped(self._first_problems).items()
                )
            elif self._more:
                self._try(self._more)
            else:
                self._fail([default])
        elif found is None:
            self._fail([self.address, *self._candidates])
        else:
            reasons = (
                f"{one} from {self._names(ranks)}" for one, ranks in _grouped(self._first_problems).items()
            )
            what = f"MASTER_ADDR={found}" if self._server is None else f"{self._first.host.name} is {found}"
            self.notes = (f"{what}, because {self.address} {', '.join(reasons)}",)
            self.address = found

    def _fail(self, candidates: list[str]) -> None:
        is_second_round = len(candidates) > 1
        tried = {
            rank: [self._first_problems.get(rank, ""), *(self._problems[rank] if is_second_round else ())]
            for rank in self._peers
        }
        if self._server is None:
            self.failures = who_fails(self._first.host.name, self._port, candidates, tried)
            return
        self.warnings = tuple(
            f"{self._names(ranks)} cannot reach {self._first.host.name}, where {self._server.role} will "
            f"listen on port {self._port}: {self.address} {problem}; let the hosts connect to each other"
            for problem, ranks in _grouped(self._first_problems).items()
        )

    def _names(self, node_ranks: Sequence[int]) -> str:
        names = [self._plan.nodes[rank].host.name for rank in node_ranks]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def first_reached(candidates: Sequence[str], problems: Mapping[int, Sequence[str]]) -> str | None:
    """Return the first candidate that all nodes reached, for which `problems` has only empty texts."""
    for place, candidate in enumerate(candidates):
        if not any(of_node[place] for of_node in problems.values()):
            return candidate
    return None


def who_fails(
    first: str, port: int, candidates: Sequence[str], problems: Mapping[int, Sequence[str]]
) -> tuple[tuple[int, str], ...]:
    """Return the nodes that cannot reach the candidate that most nodes reach: node_rank, failed tries,
    advice.
    """
    best = min(
        range(len(candidates)), key=lambda place: sum(bool(of_node[place]) for of_node in problems.values())
    )
    return tuple(
        (node_rank, _describe(first, port, candidates, problems[node_rank]))
        for node_rank in sorted(problems)
        if problems[node_rank][best]
    )


def _describe(first: str, port: int, candidates: Sequence[str], problems: Sequence[str]) -> str:
    tried = ", ".join(f"{one} {why}" for one, why in zip(candidates, problems, strict=True) if why)
    return (
        f"cannot reach {first}, where rank 0 will listen on port {port}: {tried}; "
        "let the hosts connect to each other, or give the right address with --master_addr"
    )


def candidates_of(default: str, own: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the candidates to try, in order, each once."""
    return [default, *_without_repetition([*own, *names], known=default)]


def _without_repetition(candidates: Iterable[str], *, known: str) -> list[str]:
    return [one for one in dict.fromkeys(candidates) if one and one != known][:MAX_CANDIDATES]


def _grouped(problems: Mapping[int, str]) -> dict[str, list[int]]:
    """Group the node ranks that have the same problem."""
    groups: dict[str, list[int]] = {}
    for node_rank, problem in sorted(problems.items()):
        groups.setdefault(problem, []).append(node_rank)
    return groups
