"""What the report of a hang says, for every way in which ranks can keep each other waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dslaunch.runtime.comm import flight_recorder
from dslaunch.runtime.comm.flight_recorder import (
    DATA_LANE,
    JOB_LANE,
    NUM_LANES,
    PARAMETER_LANE,
    RECEIVE_LANE,
    SEND_LANE,
    Collective,
    FlightRecorder,
    Turns,
)
from dslaunch.runtime.comm.rank_names import RankNames
from dslaunch.runtime.comm.watchdog.hang_report import describe_hang
from dslaunch.runtime.comm.watchdog.position import Position, Wait, take_position
from dslaunch.shared.axes import Axes

A, B, C = (Collective(0, number, 17, "all_gather", f"unit '{number}'", 8) for number in (1, 2, 3))
OTHER_B = Collective(0, 2, 17, "all_gather", "unit 'other'", 8)
LANE_1 = Collective(1, 1, 17, "all_gather", "unit 'p'", 8)


def position(
    rank: int, *recent: Collective, waits: Collective | None = None, s: float = 300.0, is_awaited: bool = True
) -> Position:
    done = (*recent, waits) if waits else recent
    return Position(
        rank=rank,
        host=f"node{rank // 2}",
        pid=100 + rank,
        step=17,
        issued=tuple(
            max((one.number for one in done if one.lane == lane), default=0) for lane in range(NUM_LANES)
        ),
        waits=(Wait(label=waits, s=s, is_awaited=is_awaited),) if waits else (),
        recent=tuple(done),
        quiet_s=s,
        stack=('File "train.py", line 21, in evaluate',),
        turns=tuple(Turns(one.axis, one.ranks, one.turn) for one in done if one.ranks),
    )


def first_line(*positions: Position, world_size: int = 4) -> str:
    text = describe_hang({one.rank: one for one in positions}, world_size=world_size)
    assert text is not None
    return text.splitlines()[0].removeprefix("dslaunch: it hangs: ")


WAITING = tuple(position(rank, A, waits=B) for rank in range(3))


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (
            position(3, A, s=312.0),
            "rank 3 has not come to all_gather of unit '2' (step 17), for which ranks 0-2 have waited 300 s; "
            "in its own code for 312 s, after all_gather of unit '1'",
        ),
        (
            position(3),
            "rank 3 has not come to all_gather of unit '2' (step 17), for which ranks 0-2 have waited 300 s; "
            "in its own code for 300 s, before any collective",
        ),
        (
            position(3, A, waits=LANE_1),
            "rank 3 has not come to all_gather of unit '2' (step 17), for which ranks 0-2 have waited 300 s; "
            "waiting for all_gather of unit 'p'; the ranks took different paths",
        ),
        (
            position(3, A, waits=OTHER_B),
            "ranks 0-2 came to all_gather of unit '2' where rank 3 came to all_gather of unit 'other' (step "
            "17): the ranks took different paths",
        ),
        (
            position(3, A, OTHER_B, waits=C),  # the exchange of B did not fail, as the units have one size
            "ranks 0-2 came to all_gather of unit '2' where rank 3 came to all_gather of unit 'other' (step "
            "17): the ranks took different paths",
        ),
        (
            position(3, A, waits=B),
            "all ranks have come to all_gather of unit '2' (step 17), and it has not ended for 300 s: the "
            "network or a device is stuck",
        ),
        (
            position(3, A, waits=B, s=2.0),  # it came after it was asked
            "rank 3 came to all_gather of unit '2' (step 17) only 2 s ago, for which ranks 0-2 have waited "
            "300 s",
        ),
        (
            replace(position(3, A), elsewhere="all_gather of unit 'p' (step 16) of another engine"),
            "rank 3 has not come to all_gather of unit '2' (step 17), for which ranks 0-2 have waited 300 s; "
            "waiting for all_gather of unit 'p' (step 16) of another engine; the ranks took different paths",
        ),
    ],
)
def test_the_first_line_says_who_and_what(last: Position, expected: str) -> None:
    assert first_line(*WAITING, last) == expected


def test_ranks_with_other_data_have_not_taken_other_paths() -> None:
    """Along tp ranks 0 and 1 send each other other sizes than ranks 2 and 3 do; rank 3 is late."""
    small, large = (
        Collective(DATA_LANE, 1, 17, "all_reduce", "the output of 'up'", nbytes, "tp", line, turn=1)
        for nbytes, line in ((8, (0, 1)), (16, (2, 3)))
    )
    norm = Collective(0, 1, 17, "all_gather", "the gradient norm", 8)
    there = [position(0, small, waits=norm), position(1, small, waits=norm), position(2, waits=large)]
    assert first_line(*there, position(3)) == (
        "rank 3 has not come to all_reduce of the output of 'up' over tp (step 17), for which rank 2 has "
        "waited 300 s; in its own code for 300 s, before any collective"
    )


def test_a_position_says_what_another_engine_of_the_program_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flight_recorder, "_RECORDERS", [])  # none of the tests that ran before
    one, other = FlightRecorder(), FlightRecorder()
    flight = one.begin("all_gather", "unit 'p'", nbytes=8, lane=PARAMETER_LANE)
    positions = flight.run(lambda: [take_position(each, rank=0) for each in (one, other)])
    said = [each.elsewhere for each in positions]
    assert said == ["", "all_gather of unit 'p' (step 1) of another engine"]
    assert [one.label.what for one in positions[0].waits] == ["unit 'p'"]
    assert take_position(other, rank=0).elsewhere == ""
    assert Position.from_json(positions[1].to_json()) == positions[1]


def test_a_rank_that_says_nothing_is_named_with_the_last_that_it_can_have_done() -> None:
    assert first_line(*WAITING) == (
        "rank 3 does not answer (ended, stopped, or in code that keeps Python's lock), while ranks 0-2 have "
        "waited 300 s for all_gather of unit '2' (step 17); the last that rank 3 can have taken part in is "
        "all_gather of unit '1' (step 17)"
    )


def test_ranks_that_wait_for_somebody_else_are_not_said_to_have_gone_another_way() -> None:
    line = first_line(*WAITING[:2], position(2, A, waits=LANE_1, s=200.0), position(3, A))
    assert line == (
        "ranks 2-3 have not come to all_gather of unit '2' (step 17), for which ranks 0-1 have waited 300 "
        "s; rank 2: waiting for all_gather of unit 'p'; rank 3: in its own code for 300 s, after "
        "all_gather of unit '1'"
    )
    assert first_line(*WAITING[:2], position(2, A)).endswith(
        "; rank 3 does not answer (ended, stopped, or in code that keeps Python's lock)"
    )


def test_ranks_at_one_place_share_a_row_and_a_stack() -> None:
    text = describe_hang(
        {one.rank: one for one in (*WAITING, position(4, A), position(5, A, waits=B, is_awaited=False))},
        world_size=6,
    )
    assert text is not None
    assert text.splitlines()[1:] == [
        "dslaunch:   ranks  host         step  what it does                            number    for",
        "dslaunch:   0-2    node0,node1    17  waits for all_gather of unit '2'             2  300 s",
        "dslaunch:   3      ?               ?  does not answer                              ?      ?",
        "dslaunch:   4      node2          17  own code, after all_gather of unit '1'       -  300 s",
        "dslaunch:   5      node2          17  has begun all_gather of unit '2'             2  300 s",
        "dslaunch: rank 0 (node0, pid 100), most recent call last:",
        'dslaunch:     File "train.py", line 21, in evaluate',
        "dslaunch: rank 4 (node2, pid 104), most recent call last:",
        'dslaunch:     File "train.py", line 21, in evaluate',
        "dslaunch: rank 5 (node2, pid 105), most recent call last:",
        'dslaunch:     File "train.py", line 21, in evaluate',
    ]


def test_a_rank_that_went_on_meanwhile_needs_no_report() -> None:
    assert describe_hang({0: position(0, A), 1: position(1, A)}, world_size=2) is None


def test_a_position_travels_as_json() -> None:
    for one in (*WAITING, position(3), position(4, A, waits=LANE_1, is_awaited=False)):
        assert Position.from_json(one.to_json()) == one


NORM = Collective(JOB_LANE, 1, 17, "all_gather", "the gradient norm", 8)
TWO_MODELS = (0, 0, 2, 2)


def test_ranks_with_another_model_may_do_other_collectives() -> None:
    """They wait for those of the whole job together; the cause is where some wait among themselves."""
    positions = {
        0: position(0, A, B, waits=NORM, s=310.0),
        1: position(1, A, B, waits=NORM, s=310.0),
        2: position(2, A, waits=OTHER_B, s=305.0),
        3: position(3, A, s=312.0),
    }
    text = describe_hang(positions, world_size=4, leaders=TWO_MODELS)
    assert text is not None
    assert (
        "rank 3 has not come to all_gather of unit 'other' (step 17), for which rank 2 has waited 305 s; "
        "in its own code for 312 s, after all_gather of unit '1'"
    ) in text.splitlines()[0]
    positions[2] = position(2, A, OTHER_B, waits=NORM, s=305.0)
    positions[3] = position(3, A, OTHER_B, s=312.0)
    text = describe_hang(positions, world_size=4, leaders=TWO_MODELS)
    assert text is not None
    assert "rank 3 has not come to all_gather of the gradient norm" in text.splitlines()[0]
    assert "for which ranks 0-2 have waited 310 s" in text.splitlines()[0]
    positions[3] = position(3, A, B, waits=NORM)
    text = describe_hang(positions, world_size=4, leaders=TWO_MODELS)
    assert text is not None
    assert "rank 2 came to all_gather of unit 'other' where rank 3 came to all_gather of unit '2'" in text


SUM = Collective(0, 2, 17, "all_reduce", "the output of 'down'", 8, "tp", (2, 3), 1)
AVERAGE = Collective(0, 5, 17, "reduce_scatter", "unit 'head'", 8)


@pytest.mark.parametrize("shortest_s", [300.0, 310.0])
def test_a_rank_that_stops_inside_a_divided_layer_is_named_with_its_axis(shortest_s: float) -> None:
    """Ranks 0 and 1 compute one model together, 2 and 3 another one; 0 and 2 wait for each other."""
    positions = (
        *(position(rank, A, waits=AVERAGE) for rank in (0, 1)),
        position(2, A, waits=SUM, s=shortest_s),
        position(3, A),
    )
    read = {one.rank: Position.from_json(one.to_json()) for one in positions}
    text = describe_hang(read, world_size=4, leaders=(0, 1, 0, 1))
    assert text is not None
    assert text.splitlines()[0] == (
        "dslaunch: it hangs: rank 3 has not come to all_reduce of the output of 'down' over tp (step 17), "
        f"for which rank 2 has waited {shortest_s:.0f} s; in its own code for 300 s, after all_gather of "
        "unit '1'"
    )


# ---- pipelines: 2 stages x 2 ranks with data of their own x 2 parts of each layer

CUBE = Axes(pp=2, dp=2, tp=2)
OUTPUT, GRADIENT = (
    "the output of stage 0, micro batch 1",
    "the gradient of what came into stage 1, micro batch 0",
)


def message(op: str, what: str, sender: int, receiver: int, turn: int) -> Collective:
    lane = SEND_LANE if op == "send" else RECEIVE_LANE
    return Collective(lane, 40 + turn, 17, op, what, 0, "", (sender, receiver), turn)


def of_cube(*positions: Position) -> list[str]:
    """The lines of the report, once the positions have travelled."""
    read = {one.rank: Position.from_json(one.to_json()) for one in positions}
    names = RankNames(CUBE.places)
    text = describe_hang(read, world_size=8, leaders=CUBE.leaders, names=names)
    assert text is not None
    return text.splitlines()


def test_the_rank_of_a_pipeline_that_sends_nothing_is_named_with_its_place_and_the_micro_batch() -> None:
    """Rank 4 stands still in a layer, and has begun to receive the next micro batch. Its neighbour along tp
    waits for its part of a layer, the stage before for gradients, and the other data for the average.
    """
    of_layer = Collective(0, 9, 17, "all_reduce", "the output of 'down'", 8, "tp", (4, 5), 9)
    lines = of_cube(
        position(0, A, waits=message("receive", GRADIENT, 4, 0, 1), s=310.0),
        position(1, A, waits=message("receive", GRADIENT, 5, 1, 1), s=309.0),
        position(2, A, waits=AVERAGE, s=305.0),
        position(3, A, waits=AVERAGE, s=305.0),
        position(4, A, waits=message("receive", OUTPUT, 0, 4, 2), s=311.0, is_awaited=False),
        position(5, A, waits=of_layer, s=308.0),
        position(6, A, waits=AVERAGE, s=305.0),
        position(7, A, waits=AVERAGE, s=305.0),
    )
    assert lines[0] == (
        "dslaunch: it hangs: rank 4 (stage 1 of 2, dp 0, tp 0) has not sent the gradient of what came into "
        "stage 1, micro batch 0 (step 17), for which rank 0 (stage 0 of 2, dp 0, tp 0) has waited 310 s; in "
        "its own code for 311 s, after receive of the output of stage 0, micro batch 1"
    )
    words = [" ".join(line.split()) for line in lines]
    assert words[1] == "dslaunch: ranks place host step what it does number for"
    assert "dslaunch: 4 stage 1 of 2, dp 0, tp 0 node2 17 own code, after receive of" in "\n".join(words)
    assert "rank 4 (stage 1 of 2, dp 0, tp 0, node2, pid 104), most recent call last:" in "\n".join(lines)


def test_the_first_of_several_stages_that_wait_for_each_other_is_followed_to_the_cause() -> None:
    waiting = position(0, A, waits=message("receive", GRADIENT, 4, 0, 3), s=320.0)
    of_line = Collective(0, 4, 17, "all_gather", "the micro batches", 8, "pp", (0, 4), 3)
    tp_4 = position(4, A, waits=SUM._replace(ranks=(4, 5)), s=300.0)
    assert (
        "rank 5 (stage 1 of 2, dp 0, tp 1) has not come to all_reduce of the output of 'down' over tp"
        in (of_cube(waiting, tp_4, position(5, A))[0])
    )
    # Of stages with other numbers of collectives: the data of rank 4 do not come.
    others = [position(rank, A, B, C, waits=AVERAGE, s=200.0) for rank in (1, 2, 3)]
    line = of_cube(position(0, A, B, C, waits=of_line), *others, position(4, A))[0]
    assert line.startswith(
        "dslaunch: it hangs: rank 4 (stage 1 of 2, dp 0, tp 0) has not come to all_gather of the micro "
        "batches over pp (step 17), for which rank 0 (stage 0 of 2, dp 0, tp 0) has waited 300 s; in its own"
    )


def test_a_send_that_is_not_received_and_a_stage_that_does_not_answer_are_told() -> None:
    sends = position(0, A, waits=message("send", OUTPUT, 0, 4, 2))
    assert of_cube(sends, position(4, A))[0].startswith(
        "dslaunch: it hangs: rank 4 (stage 1 of 2, dp 0, tp 0) has not begun to receive the output of stage "
        "0, micro batch 1 (step 17), which rank 0 (stage 0 of 2, dp 0, tp 0) has been sending for 300 s; "
    )
    waits = position(0, A, message("receive", GRADIENT, 4, 0, 1), waits=message("receive", "x", 4, 0, 2))
    assert of_cube(waits)[0].startswith(
        "dslaunch: it hangs: rank 4 (stage 1 of 2, dp 0, tp 0) does not answer (ended, stopped, or in code "
        "that keeps Python's lock), while rank 0 (stage 0 of 2, dp 0, tp 0) has waited 300 s for x (step 17"
        f"); the last that rank 4 (stage 1 of 2, dp 0, tp 0) can have taken part in is receive of {GRADIENT}"
    )


def test_a_send_that_gloo_does_not_tell_the_end_of_is_no_hang() -> None:
    sent = position(0, A, waits=message("send", OUTPUT, 0, 4, 2), is_awaited=False)
    waits = position(4, A, waits=B, s=1.0)
    assert "stage 0" not in of_cube(sent, waits, position(6, A))[0].split(";")[0]
