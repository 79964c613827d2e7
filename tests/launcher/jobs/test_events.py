"""What whole jobs tell of themselves: the events in all three places, and the numbers of their ranks."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.local_job import Start, poll

pytestmark = pytest.mark.slow

TELL = """
import json
def tell(**numbers):
    while True:
        try:
            fd = os.open(os.environ['DSLAUNCH_METRICS_PIPE'], os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:  # it is not there yet, or nobody reads yet
            time.sleep(0.01)
    os.write(fd, f'{rank} {json.dumps(numbers)}\\n'.encode())
    os.close(fd)
"""


# Nobody can make a folder in /tmp and /var/tmp, and the job is elsewhere.
NO_TMP = """exec unshare --mount sh -c 'mount --bind . /mnt
for one in /tmp /var/tmp; do mount --bind $one $one && mount -o remount,ro,bind $one; done
cd /mnt; exec "$@"' sh "$@"
"""


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in events if one["event"] == kind]


def test_a_job_tells_what_happens_and_the_numbers_of_its_ranks(start: Start, tmp_path: Path) -> None:
    state = tmp_path / "state"
    job = start(
        TELL
        + textwrap.dedent("""
        say('one', rank)
        say('two', rank)
        tell(step=1, steps=1, loss=0.5 + rank)
        tell(step=2, steps=1, loss=0.25 + rank)
        while not os.path.exists('go'): time.sleep(0.01)
        tell(step=3, steps=1, loss=float('nan'))
        if rank == 0:
            os.symlink(f'/proc/{os.getpid()}', 'other')
            sys.exit()
        while not os.path.islink('other') or os.path.exists('other'): time.sleep(0.01)  # it has ended
        sys.exit(3)
        """),
        *("--num_gpus", "2", "--events", "events", "--log_dir", "logs", "--metrics_interval", "0.1"),
        env={"XDG_STATE_HOME": str(state)},
    )
    found = tmp_path / "events"
    poll(lambda: found.exists() and '"loss":1.25' in found.read_text(), "the numbers of rank 1")
    (ring,) = state.rglob("events")
    poll(lambda: '"loss":1.25' in ring.read_text(), "the same in the job's own folder")
    assert [one["event"] for one in events_of(ring)[:2]] == ["job", "attempt"]
    (tmp_path / "go").touch()
    assert job.wait() == 3
    for path in (found, next((tmp_path / "logs").glob("2*/events.jsonl"))):
        events = events_of(path)
        kinds = [one["event"] for one in events]
        assert kinds[0] == "job"
        assert (
            kinds.index("attempt") < kinds.index("started") < kinds.index("running") < kinds.index("exited")
        )
        assert kinds[-1] == "end"
        (begun,) = of(events, "job")
        assert begun["name"] == "train"
        assert begun["command"][0] == "dslaunch"
        assert begun["cwd"] == str(tmp_path)
        (attempt,) = of(events, "attempt")
        assert attempt["workers"] == [["localhost", 0, 0, 0], ["localhost", 0, 1, 1]]
        assert {(one["rank"], one["code"]) for one in of(events, "exited")} == {(0, 0), (1, 3)}
        (verdict,) = of(events, "verdict")
        assert verdict["exit_code"] == 3
        assert verdict["culprit"]["rank"] == 1
        assert of(events, "end")[0]["exit_code"] == 3
        rows = [one["ranks"] for one in of(events, "metrics")]
        assert sum(row.get("1", {}).get("steps", 0) for row in rows) == 3, "none is lost, at the end neither"
        assert [row["1"]["loss"] for row in rows if "1" in row][-1] == "nan"
        lines = [one["lines"] for one in of(events, "metrics")]
        assert sum(one.get("0", 0) for one in lines) == 2
        hosts = [one["hosts"]["localhost"] for one in of(events, "metrics") if one["hosts"]]
        assert hosts[-1]["mem_total"] > 0
        assert any("rank 1" in one["text"] for one in of(events, "note"))
    assert list(state.rglob("events")) == []


def test_numbers_that_nobody_wants_are_not_asked_for(start: Start, tmp_path: Path) -> None:
    job = start(
        "say(sorted(name for name in os.environ if 'METRICS' in name))",
        *("--num_gpus", "1", "--metrics_interval", "0", "--events", "events"),
    )
    assert job.wait() == 0
    assert job.lines(0) == ["[]"]
    assert sum(one["lines"].get("0", 0) for one in of(events_of(tmp_path / "events"), "metrics")) == 1


def test_a_job_without_numbers_of_its_workers_says_so(start: Start) -> None:
    job = start("open(os.environ['DSLAUNCH_METRICS_PIPE'], 'w').close()\nwait()", "--num_gpus", "1")
    job.wait_for_err("localhost: no numbers of its workers will be seen: ")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert "/metrics: File exists" in job.err
    job = start("", "--num_gpus", "1", env=dict.fromkeys(("TMPDIR", "TEMP", "TMP"), ""), shell=NO_TMP)
    assert job.wait() == 0, job.err
    assert "no temporary folder can be made, so no numbers of the workers here are seen" in job.err


def test_each_attempt_has_its_own_events(start: Start, tmp_path: Path) -> None:
    job = start(
        "sys.exit(7 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)",
        *("--num_gpus", "1", "--max_restarts", "1", "--min_uptime", "0", "--events", "/dev/stdout"),
    )
    assert job.wait() == 0
    events = [json.loads(line) for line in job.out.splitlines() if line.startswith("{")]
    assert [(one["attempt"], one["exit_code"]) for one in of(events, "verdict")] == [(0, 7), (1, 0)]
    assert "starting again" in of(events, "verdict")[0]["decision"] or of(events, "verdict")[0]["decision"]
    assert of(events, "end")[0]["exit_code"] == 0
    assert os.path.exists(tmp_path / "train.py")


def test_a_hang_is_among_them(start: Start, tmp_path: Path) -> None:
    """What the watchdog of a rank has written beside the pipe."""
    report = "it hangs:\n  rank 1 has not come to a step"
    job = start(
        TELL
        + textwrap.dedent(f"""
        tell(step=1)
        folder = os.path.dirname(os.environ['DSLAUNCH_METRICS_PIPE'])
        with open(os.path.join(folder, 'hang-0.json'), 'w') as file:
            json.dump({report!r}, file)
        tell(file='hang')
        wait()
        """),
        *("--num_gpus", "1", "--events", "events"),
    )
    found = tmp_path / "events"
    poll(lambda: found.exists() and '"event":"hang"' in found.read_text(), "the hang")
    (hang,) = of(events_of(found), "hang")
    assert (hang["rank"], hang["report"]) == (0, report)
    job.end()
