from __future__ import annotations

import pytest

from dslaunch.launcher.controller.master_search import (
    MAX_CANDIDATES,
    MasterSearch,
    candidates_of,
    first_reached,
)
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.job.plan import Endpoint, NodePlan, Plan, Program
from dslaunch.launcher.options.roles import Health, Role
from dslaunch.launcher.wire.frames import Frame, Listen, Listening, Reach, Reached

REFUSED = "refused the connection"
SILENT = "did not answer within 5 s"


def plan_of(num_nodes: int, *, address: str | None = None, num_local: int = 0) -> Plan:
    nodes = tuple(
        NodePlan(
            node_rank=rank,
            host=Host(name=f"n{rank}", slots=1),
            is_local=rank < num_local,
            devices=(),
            ranks=(),
        )
        for rank in range(num_nodes)
    )
    return Plan(
        nodes=nodes,
        master=Endpoint(address=address, port=29500, is_port_fixed=False),
        program=Program(python=None, head=("job",), script=None, arguments=(), takes_local_rank=False),
        cwd="/",
        venv_script=None,
        environment=(),
        kill_grace_s=1.0,
        heartbeat_s=1.0,
    )


class Cluster:
    """Agents that answer: `problems[node_rank][address]` is what keeps a node from an address of node 0."""

    def __init__(
        self, plan: Plan, own: list[str], problems: dict[int, dict[str, str]], *, problem: str = ""
    ) -> None:
        self.search = MasterSearch(plan, self._send)
        self.tried: list[tuple[int, list[str]]] = []
        self._own = own
        self._problems = problems
        self._problem = problem
        self._inbox: list[tuple[int, Listening | Reached]] = []
        self._token = ""
        self.ready = [node.node_rank for node in plan.nodes]

    def _send(self, node_rank: int, frame: Frame) -> None:
        if isinstance(frame, Listen):
            assert (node_rank, frame.port) == (0, 0)
            self._token = frame.token
            self._inbox.append((0, Listening(4000, self._own, self._problem)))
        elif isinstance(frame, Reach):
            assert (frame.port, frame.token) == (4000, self._token)
            self.tried.append((node_rank, frame.addresses))
            of_node = self._problems.get(node_rank, {})
            self._inbox.append((node_rank, Reached([of_node.get(one, "") for one in frame.addresses])))

    def find(self, default: str) -> MasterSearch:
        self.search.listen()
        self._deliver()
        for node_rank in self.ready:
            self.search.prepare(node_rank)
        self.search.begin(default, more=("n0.example", "n0"))
        assert self.search.is_over == (not self._inbox)
        assert self.search.is_over or self.search.is_answered(0)
        self._deliver()
        assert self.search.is_over
        return self.search

    def _deliver(self) -> None:
        while self._inbox:
            self.search.take(*self._inbox.pop(0))


def test_who_is_not_ready_is_asked_when_it_is() -> None:
    cluster = Cluster(plan_of(3), ["10.0.0.1"], {})
    search = cluster.search
    search.listen()
    cluster._deliver()
    search.begin("10.0.0.1")
    assert (cluster.tried, search.is_answered(1), search.is_over) == ([], False, False)
    search.prepare(2)
    cluster._deliver()
    assert (cluster.tried, search.is_answered(2), search.is_over) == ([(2, ["10.0.0.1"])], True, False)
    search.prepare(1)
    cluster._deliver()
    assert (cluster.tried[1:], search.is_over, search.address) == ([(1, ["10.0.0.1"])], True, "10.0.0.1")


def test_if_all_reach_the_first_address_nothing_else_is_tried() -> None:
    cluster = Cluster(plan_of(3), ["172.17.0.1", "10.0.0.1"], {})
    search = cluster.find("10.0.0.1")
    assert search.address == "10.0.0.1"
    assert cluster.tried == [(1, ["10.0.0.1"]), (2, ["10.0.0.1"])]
    assert (search.failures, search.notes, search.warnings) == ((), (), ())
    assert all(search.is_answered(rank) for rank in range(3))


def test_the_first_address_that_all_reach_is_taken_and_said() -> None:
    problems = {
        1: {"10.0.0.1": SILENT, "172.17.0.1": "is another host or program"},
        2: {"10.0.0.1": SILENT, "172.17.0.1": "is another host or program", "10.1.0.1": REFUSED},
    }
    cluster = Cluster(plan_of(4), ["172.17.0.1", "10.0.0.1", "10.1.0.1", "10.2.0.1"], problems)
    search = cluster.find("10.0.0.1")
    assert search.address == "10.2.0.1"
    assert cluster.tried[3] == (1, ["172.17.0.1", "10.1.0.1", "10.2.0.1", "n0.example", "n0"])
    assert search.notes == ("MASTER_ADDR=10.2.0.1, because 10.0.0.1 did not answer within 5 s from n1, n2",)
    assert search.failures == ()


def test_an_address_that_only_some_reach_is_not_taken() -> None:
    """Each node reaches one address, but no address is reached by both."""
    names = {"n0.example": REFUSED, "n0": REFUSED}
    problems = {1: {"10.0.0.1": SILENT, **names}, 2: {"10.1.0.1": REFUSED, **names}}
    search = Cluster(plan_of(3), ["10.0.0.1", "10.1.0.1"], problems).find("10.0.0.1")
    assert search.failures == (
        (
            1,
            "cannot reach n0, where rank 0 will listen on port 4000: 10.0.0.1 did not answer within 5 s, "
            "n0.example refused the connection, n0 refused the connection; let the hosts connect to each "
            "other, or give the right address with --master_addr",
        ),
    )


def test_who_reaches_nothing_is_named_and_the_others_are_not() -> None:
    every = dict.fromkeys(("10.0.0.1", "n0.example", "n0"), SILENT)
    search = Cluster(plan_of(4), ["10.0.0.1"], {2: every}).find("10.0.0.1")
    ((node_rank, message),) = search.failures
    assert node_rank == 2
    assert message.startswith(
        "cannot reach n0, where rank 0 will listen on port 4000: 10.0.0.1 did not answer"
    )


def test_an_address_that_was_given_is_used_and_only_warned_about() -> None:
    plan = plan_of(3, address="192.168.0.9")
    cluster = Cluster(plan, ["10.0.0.1"], {2: {"192.168.0.9": SILENT}})
    search = cluster.find("192.168.0.9")
    assert search.address == "192.168.0.9"
    assert search.failures == ()
    assert search.warnings == ("--master_addr=192.168.0.9: from n2 it did not answer within 5 s (port 4000)",)
    assert len(cluster.tried) == 2


def test_nobody_tries_before_node_0_listens() -> None:
    """Node 0 may say that it listens after all have said that they are ready."""
    sent: list[tuple[int, Frame]] = []
    search = MasterSearch(plan_of(3), lambda rank, frame: sent.append((rank, frame)))
    search.listen()
    for node_rank in range(3):
        search.prepare(node_rank)
    search.begin("10.0.0.1")
    assert [type(frame) for _, frame in sent] == [Listen]
    assert not any(search.is_answered(rank) for rank in range(3))
    search.take(0, Listening(4000, [], ""))
    assert [(rank, type(frame)) for rank, frame in sent[1:]] == [(1, Reach), (2, Reach)]
    assert [search.is_answered(rank) for rank in range(3)] == [True, False, False]
    search.take(2, Reached([""]))
    assert [search.is_answered(rank) for rank in range(3)] == [True, False, True]
    assert not search.is_over
    search.take(1, Reached([""]))
    assert search.is_over


@pytest.mark.parametrize("plan", [plan_of(1), plan_of(2, num_local=2)])
def test_on_one_machine_nothing_is_tried(plan: Plan) -> None:
    cluster = Cluster(plan, ["10.0.0.1"], {})
    assert cluster.find("127.0.0.1").address == "127.0.0.1"
    assert cluster.tried == []
    assert not cluster.search.is_needed


def test_a_port_that_was_taken_in_between_fails_node_0() -> None:
    cluster = Cluster(plan_of(2), [], {}, problem="port 4000 is in use")
    assert cluster.find("10.0.0.1").failures == (
        (0, "port 4000 is in use, though it was free just now; start the job again"),
    )
    assert cluster.tried == []


def test_an_answer_of_the_wrong_length_counts_as_not_tried() -> None:
    plan = plan_of(2)._replace(nodes=plan_of(2).nodes)
    search = MasterSearch(plan, lambda rank, frame: None)
    search.take(0, Listening(4000, [], ""))
    search.begin("10.0.0.1")
    search.prepare(1)
    assert not search.is_answered(1)
    search.take(1, Reached([]))
    assert search.is_answered(1)
    assert "10.0.0.1 was not tried" in search.failures[0][1]


def test_candidates_are_tried_once_each_and_not_without_end() -> None:
    own = ["10.0.0.1", "fd00::1", "10.0.0.1", ""]
    assert candidates_of("10.9.9.9", own, ["n0", "n0"]) == ["10.9.9.9", "10.0.0.1", "fd00::1", "n0"]
    assert len(candidates_of("a", [f"10.0.0.{place}" for place in range(99)], [])) == 1 + MAX_CANDIDATES


def test_the_first_that_everybody_reached() -> None:
    assert first_reached(["a", "b"], {1: ["", ""], 2: ["x", ""]}) == "b"
    assert first_reached(["a"], {1: ["x"]}) is None
    assert first_reached(["a"], {}) == "a"


def test_a_server_s_address_is_tried_from_the_trainers_and_only_warned_of() -> None:
    server = NodePlan(
        node_rank=2,
        host=Host(name="n2", slots=1),
        is_local=False,
        devices=(),
        ranks=(),
        role="rollout",
    )
    role = Role(name="rollout", command="serve", health=Health("", 8000, "/health"))
    plan = plan_of(2)._replace(servers=(server,), roles=(role,))
    sent: list[tuple[int, Frame]] = []

    def search(addresses: dict[str, str]) -> MasterSearch:
        sent.clear()
        one = MasterSearch(plan, lambda node_rank, frame: sent.append((node_rank, frame)), server=server)
        one.listen()
        ((node_rank, listen),) = sent
        assert (node_rank, type(listen), listen[0]) == (2, Listen, 8000)
        one.prepare(0)
        one.prepare(1)
        one.begin("10.0.0.2", more=("n2",))
        one.take(2, Listening(8000, ["10.0.0.2", "10.9.9.2"], ""))
        while not one.is_over:
            asked = [(rank, frame) for rank, frame in sent if isinstance(frame, Reach)]
            sent.clear()
            assert [rank for rank, _ in asked] == [0, 1]
            for rank, frame in asked:
                one.take(rank, Reached([addresses.get(name, "") for name in frame.addresses]))
        return one

    assert search({}).address == "10.0.0.2"
    other = search({"10.0.0.2": SILENT})
    assert other.address == "10.9.9.2"
    assert other.notes == ("n2 is 10.9.9.2, because 10.0.0.2 did not answer within 5 s from n0, n1",)
    none = search(dict.fromkeys(("10.0.0.2", "10.9.9.2", "n2"), REFUSED))
    assert (none.address, none.failures) == ("10.0.0.2", ())
    assert none.warnings == (
        "n0, n1 cannot reach n2, where rollout will listen on port 8000: 10.0.0.2 refused the connection; "
        "let the hosts connect to each other",
    )
