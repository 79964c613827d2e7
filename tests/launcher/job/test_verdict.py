from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from dslaunch.launcher.job.verdict import (
    Failure,
    HostFailure,
    RankFailure,
    Verdict,
    describe_all,
    lost_peer,
    rank_failure,
    signal_name,
    verdict_of,
)
from dslaunch.launcher.wire.frames import Exited


def rank(number: int, at_s: float, *, code: int = 1, signum: int = 0) -> RankFailure:
    return RankFailure(
        rank=number,
        local_rank=number % 2,
        host=f"w{number // 2}",
        pid=1000 + number,
        code=code,
        signal=signum,
        at_s=at_s,
        last_lines=("Traceback", "ValueError"),
    )


def host(name: str, at_s: float, *, exit_code: int = 3) -> HostFailure:
    return HostFailure(host=name, message="it is gone", at_s=at_s, exit_code=exit_code)


@pytest.mark.parametrize(
    ("said", "known", "place"),
    [
        ("stage 1 of 2, tp 1", "", "stage 1 of 2, tp 1; "),
        ("stage 1 of 2, ep 0", "stage 1 of 2", "stage 1 of 2, ep 0; "),  # the worker knows best
        ("", "stage 1 of 2", "stage 1 of 2; "),
        (7, "", ""),
    ],
)
def test_a_rank_is_told_with_its_place(said: object, known: str, place: str) -> None:
    exited = Exited(5, 1, 0, 0.0, {"place": said})
    failure = rank_failure(exited, local_rank=1, host="node3", pid=4711, at_s=1.0, place=known)
    assert failure.describe() == f"rank 5 on node3 ({place}local rank 1, pid 4711) exited with code 1"
    assert failure.name == "rank 5 on node3"


R0, R1, R2 = rank(0, 10.0, code=7), rank(1, 11.0), rank(2, 12.0)
LOST = host("w1", 9.0)


@pytest.mark.parametrize(
    ("failures", "stopped_at", "culprit", "others"),
    [
        ([], None, None, ()),
        ([], 5.0, None, ()),
        ([R0], None, R0, ()),
        ([R0], 10.5, R0, ()),
        # The earliest counts, not the first that was heard of.
        ([R1, R0], 20.0, R0, (R1,)),
        ([R2, R1, R0], 20.0, R0, (R2, R1)),
        # A lost host counts from when it was last heard of, before the ranks that waited for it gave up.
        ([R0, R1, LOST], 20.0, LOST, (R0, R1)),
        ([R0, host("w1", 10.5)], 20.0, R0, (host("w1", 10.5),)),
        # Who dies after the stop was told to.
        ([R0, R1, R2], 10.0, R0, ()),
        ([R0, R1, R2], 11.0, R0, (R1,)),
        ([R1], 5.0, None, ()),
        # A host that fails after the stop is named, because something may still run there.
        ([R0, host("w1", 30.0)], 10.0, R0, (host("w1", 30.0),)),
        ([host("w1", 30.0)], 10.0, None, (host("w1", 30.0),)),
        # Of two at the same moment the one that was heard of first.
        ([R0, rank(1, 10.0)], 10.0, R0, (rank(1, 10.0),)),
    ],
)
def test_the_culprit_is_the_earliest_failure_before_the_stop(
    failures: list[Failure], stopped_at: float | None, culprit: Failure | None, others: tuple[Failure, ...]
) -> None:
    verdict = verdict_of(failures, stopped_at=stopped_at, interrupted_by=None, phases_s={})
    assert (verdict.culprit, verdict.others) == (culprit, others)


@pytest.mark.parametrize(
    ("culprit", "interrupted_by", "code"),
    [
        (None, None, 0),
        (rank(0, 1.0, code=3), None, 3),
        (rank(0, 1.0, code=255), None, 255),
        (rank(0, 1.0, code=137, signum=9), None, 137),
        (host("w0", 1.0), None, 3),
        (host("w0", 1.0, exit_code=2), None, 2),
        (None, signal.SIGINT, 130),
        (None, signal.SIGTERM, 143),
        (None, signal.SIGHUP, 129),
        (rank(0, 1.0, code=3), signal.SIGINT, 130),
    ],
)
def test_the_exit_code_is_that_of_what_ended_the_job(
    culprit: Failure | None, interrupted_by: int | None, code: int
) -> None:
    verdict = Verdict(culprit=culprit, others=(), interrupted_by=interrupted_by, phases_s=())
    assert verdict.exit_code == code


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (rank(3, 1.0, code=2), "rank 3 on w1 (local rank 1, pid 1003) exited with code 2"),
        (
            rank(3, 1.0, code=137, signum=9),
            "rank 3 on w1 (local rank 1, pid 1003) was killed by SIGKILL (9)",
        ),
        (
            rank(3, 1.0, code=139, signum=11),
            "rank 3 on w1 (local rank 1, pid 1003) was killed by SIGSEGV (11)",
        ),
        # A program that returns 137 by itself was not killed.
        (rank(3, 1.0, code=137), "rank 3 on w1 (local rank 1, pid 1003) exited with code 137"),
        (host("w1", 1.0), "w1: it is gone"),
    ],
)
def test_a_failure_says_who_where_and_how(failure: Failure, text: str) -> None:
    assert failure.describe() == text


@pytest.mark.parametrize(
    ("number", "name"),
    [(2, "SIGINT (2)"), (15, "SIGTERM (15)"), (40, "signal 40"), (200, "signal 200")],
)
def test_signals_have_names(number: int, name: str) -> None:
    assert signal_name(number) == name


def test_a_verdict_as_json() -> None:
    verdict = verdict_of(
        [R1, R0, LOST], stopped_at=20.0, interrupted_by=None, phases_s={"connected": 0.5, "ended": 2.0}
    )
    assert json.loads(json.dumps(verdict.to_dict())) == {
        "exit_code": 3,
        "text": "w1: it is gone",
        "culprit": {
            "kind": "host",
            "text": "w1: it is gone",
            "host": "w1",
            "message": "it is gone",
            "at_s": 9.0,
            "exit_code": 3,
            "is_way_lost": False,
        },
        "others": [
            {
                "kind": "rank",
                "text": f"rank {number} on w0 (local rank {number}, pid 100{number}) exited with code {code}",
                "rank": number,
                "local_rank": number,
                "host": "w0",
                "pid": 1000 + number,
                "code": code,
                "signal": 0,
                "at_s": at_s,
                "place": "",
                "core_dumped": False,
                "is_out_of_memory": False,
                "evidence": [],
                "message": "",
                "traceback": [],
                "last_lines": ["Traceback", "ValueError"],
                "last_lines_of": "stderr",
            }
            for number, code, at_s in ((1, 1, 11.0), (0, 7, 10.0))
        ],
        "interrupted_by": None,
        "phases_s": {"connected": 0.5, "ended": 2.0},
        "end_s": {},
        "change": None,
    }
    interrupted = verdict_of([], stopped_at=1.0, interrupted_by=2, phases_s={})
    assert interrupted.to_dict() == {
        "exit_code": 130,
        "text": "interrupted by SIGINT (2)",
        "culprit": None,
        "others": [],
        "interrupted_by": "SIGINT (2)",
        "phases_s": {},
        "end_s": {},
        "change": None,
    }


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, ""),
        ({"message": "KeyError: 'x'\nand more"}, ": KeyError: 'x'"),
        ({"message": "SIGKILL", "traceback": ("Traceback", "  ValueError: y\x1b[0m", "")}, ": ValueError: y"),
        ({"is_out_of_memory": True, "traceback": ("Traceback",)}, ": out of memory"),
    ],
)
def test_a_sentence_on_a_rank_says_why_as_far_as_that_is_known(given: dict[str, Any], reason: str) -> None:
    failure = rank(3, 1.0)._replace(**given)
    verdict = Verdict(culprit=failure, others=(), interrupted_by=15, phases_s=())
    assert verdict.text == f"{failure.describe()}{reason}"
    assert len(Verdict(host("w1", 1.0)._replace(message="x" * 9999), (), None, ()).text) < 600


def test_ranks_that_had_ended_well_before_the_culprit_failed_are_named_with_what_that_means() -> None:
    culprit = RankFailure(rank=3, local_rank=3, host="a", pid=1, code=1, signal=0, at_s=20.0)
    verdict = verdict_of(
        [culprit],
        stopped_at=21.0,
        interrupted_by=None,
        phases_s={},
        ended_well={0: 12.0, 1: 15.5, 2: 20.5},
    )
    assert isinstance(verdict.culprit, RankFailure)
    assert verdict.culprit.evidence == (
        "ranks 0-1 had ended with 0 before, the last 4.5 s before: if rank 3 still waited for them, the "
        "ranks had unequal numbers of batches, or left a loop at different steps",
    )
    assert verdict.exit_code == 1


def test_an_early_end_is_the_likely_cause_where_a_rank_says_that_it_lost_another() -> None:
    lost = RankFailure(
        rank=0,
        local_rank=0,
        host="a",
        pid=1,
        code=1,
        signal=0,
        at_s=20.0,
        traceback=("Traceback", "RuntimeError: Read error [::1]:27: Connection reset by peer. This is"),
    )

    def cause(failure: RankFailure, ended_at: float) -> str:
        verdict = verdict_of(
            [failure], stopped_at=21.0, interrupted_by=None, phases_s={}, ended_well={1: ended_at}
        )
        assert isinstance(verdict.culprit, RankFailure)
        assert bool(verdict.likely_cause) <= bool(verdict.culprit.evidence)
        return verdict.likely_cause

    said = (
        "rank 1 ended with code 0 before the job was done, and rank 0 then failed with 'Connection reset by "
        "peer': that early end is the likely cause"
    )
    assert cause(lost, 19.0) == said
    assert cause(lost, 20.5) == said  # its process closed the connection, and ended then
    assert cause(lost, 21.5) == ""  # it was told to stop
    assert cause(lost._replace(traceback=("Traceback", "ValueError: no such file")), 19.0) == ""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:25498. This is", "Connection closed by peer"),
        (
            "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?",
            "Failed to recv",
        ),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
            "remote process exiting",
        ),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3", "collective operation timeout"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "Broken pipe"),
        ("ValueError: the connection string is wrong", ""),
    ],
)
def test_how_ranks_say_that_another_one_is_gone(words: str, found: str) -> None:
    failure = RankFailure(rank=0, local_rank=0, host="a", pid=1, code=1, signal=0, at_s=1.0)
    assert lost_peer(failure._replace(last_lines=("before", words))) == found
    assert lost_peer(failure._replace(traceback=("Traceback", words))) == found
    assert lost_peer(failure._replace(message=words)) == found


def test_another_culprit_than_the_one_that_was_named_at_the_stop_is_said_to_be_one() -> None:
    first, later = (
        RankFailure(rank=rank, local_rank=0, host="ab"[rank], pid=1, code=1, signal=0, at_s=at_s)
        for rank, at_s in ((0, 10.0), (1, 11.0))
    )

    def correction(announced: str) -> str:
        return verdict_of(
            [later, first], stopped_at=12.0, interrupted_by=None, phases_s={}, announced=announced
        ).correction

    assert (
        correction("rank 1 on b")
        == "rank 1 on b was named when the job was stopped, but rank 0 on a had failed before"
    )
    assert correction("rank 0 on a") == correction("") == ""


def test_a_culprit_that_fails_before_all_others_end_is_told_nothing_of_them() -> None:
    culprit = RankFailure(rank=0, local_rank=0, host="a", pid=1, code=1, signal=0, at_s=5.0)
    verdict = verdict_of([culprit], stopped_at=9.0, interrupted_by=None, phases_s={}, ended_well={1: 6.0})
    assert verdict.culprit == culprit


def test_hosts_that_failed_for_the_same_reason_are_one_sentence() -> None:
    why = "port 22 did not answer within 10 s; is the host up and not behind a firewall?"
    failures: list[Failure] = [
        HostFailure(host=f"node{number}", message=f"node{number} {why}", at_s=1.0) for number in range(33, 65)
    ]
    failures.insert(3, HostFailure(host="node9", message="node9 port 22 refused the connection", at_s=1.0))
    failures += [
        HostFailure(host=f"n{number}", message=f"cannot reach 10.0.0.{number}: no route", at_s=2.0)
        for number in (4, 2)
    ]
    assert describe_all(failures) == [
        f"node[33-64]: {why} (32 hosts)",
        "node9: node9 port 22 refused the connection",
        "n[2,4]: cannot reach 10.0.0.4: no route (2 hosts; the numbers are those of n4)",
    ]


def test_one_sentence_for_hosts_names_none_of_them_in_the_words_of_all() -> None:
    def told(words: str) -> list[str]:
        return describe_all(
            [HostFailure(host=one, message=words.replace("HOST", one), at_s=1.0) for one in ("w", "v")]
        )

    assert told("inside docker exec HOST: no such folder") == [
        "w, v: inside docker exec {host}: no such folder (2 hosts)"
    ]
    assert len(told("inside docker exec HOST-x: no such folder")) == 2  # a longer name is another one
