"""Jobs with servers beside the trainers, on this machine under two names."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.launcher.local_job import AT_ONCE_S, Start, assert_short

pytestmark = pytest.mark.slow

HOSTS = "localhost devices=0,1\n127.0.0.1 devices=2,3\n"
SERVER = "--role=rollout=127.0.0.1 "


@pytest.fixture
def start_roles(start: Start, tmp_path: Path) -> Start:
    """Starts a job with the hostfile."""
    (tmp_path / "hosts").write_text(HOSTS)
    return lambda worker, *words, **given: start(worker, "-H", "hosts", "--kill_grace=5", *words, **given)


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        number: int = one.getsockname()[1]
    return number


def test_trainers_wait_for_health_know_the_servers_and_end_them(
    start_roles: Start, tmp_path: Path, port: int
) -> None:
    serve = f"env; sleep 1; touch healthy; exec python -m http.server {port}"
    job = start_roles(
        """
        assert os.path.exists('healthy')
        for name in ('DSLAUNCH_ROLE', 'DSLAUNCH_ROLE_INDEX', 'DSLAUNCH_HOSTS_TRAINER',
                     'DSLAUNCH_HOSTS_ROLLOUT', 'WORLD_SIZE', 'RANK'):
            say(name, os.environ[name])
        """,
        SERVER + serve,
        f"--role_health=rollout=http://:{port}/",
        "--report=report.json",
        "--log_dir=logs",
        "--tee=0",
    )
    assert job.wait() == 0, job.err
    assert_short(job)
    assert job.lines(0) == [
        "DSLAUNCH_ROLE trainer",
        "DSLAUNCH_ROLE_INDEX 0",
        "DSLAUNCH_HOSTS_TRAINER 127.0.0.1",
        "DSLAUNCH_HOSTS_ROLLOUT 127.0.0.1",
        "WORLD_SIZE 2",
        "RANK 0",
    ]
    server = dict(
        line.removeprefix("127.0.0.1:rollout | ").split("=", 1)
        for line in job.out.splitlines()
        if line.startswith("127.0.0.1:rollout | ") and "=" in line
    )
    assert (server["DSLAUNCH_ROLE"], server["DSLAUNCH_ROLE_INDEX"]) == ("rollout", "0")
    assert server["DSLAUNCH_HOSTS_TRAINER"] == "127.0.0.1"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "DSLAUNCH_METRICS_PIPE"} & server.keys()
    assert "rollout on 127.0.0.1 is healthy after" in job.err
    assert "the trainers have ended: stopping its server on 127.0.0.1 (SIGTERM" in job.err
    assert "2 workers ended with code 0" in job.err
    (run,) = (one for one in (tmp_path / "logs").iterdir() if not one.is_symlink())
    assert {one.name for one in (run / "attempt_0").iterdir()} == {
        *(f"rank00{rank}.{stream}.log" for rank in (0, 1) for stream in ("stdout", "stderr")),
        *(f"rollout.{stream}.log" for stream in ("stdout", "stderr")),
    }
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["servers"] == [{"role": "rollout", "host": "127.0.0.1", "restarts": 0}]
    job.assert_nothing_is_left()


def test_a_server_that_dies_while_it_is_waited_for_is_named_at_once(
    start_roles: Start, tmp_path: Path, port: int
) -> None:
    words = ("echo loading; echo no memory left >&2; exit 7", f"--role_health=rollout={port}")
    job = start_roles("say('trains')", SERVER + words[0], words[1], "--report=report.json")
    assert job.wait(AT_ONCE_S) == 7
    assert "trains" not in job.out
    assert "rollout on 127.0.0.1 (pid " in job.err
    assert "exited with code 7; it failed first" in job.err
    assert "last lines of rollout:\n    no memory left\n" in job.err
    culprit = json.loads((tmp_path / "report.json").read_text())["culprit"]
    assert (culprit["kind"], culprit["role"], culprit["host"]) == ("server", "rollout", "127.0.0.1")
    assert "rank" not in culprit
    job.assert_nothing_is_left()


def test_a_server_that_never_answers_fails_the_job_at_its_deadline(start_roles: Start, port: int) -> None:
    words = (f"--role_health=rollout={port}", "--role_timeout=3")
    job = start_roles("say('trains')", f"{SERVER}sleep 1000", *words)
    assert job.wait() == 1
    assert "trains" not in job.out
    assert f"waiting for 1 of 1 server: rollout on 127.0.0.1 refuses connections on port {port}" in job.err
    assert "127.0.0.1: rollout is not healthy 3 s after its start (--role_timeout)" in job.err
    job.assert_nothing_is_left()


def test_another_program_s_answer_is_not_taken_for_the_server_s(start_roles: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        job = start_roles("say('trains')", f"{SERVER}echo serves", f"--role_health=rollout={port}")
        assert job.wait() == 1
    assert "trains" not in job.out
    assert "serves" not in job.out
    assert f"127.0.0.1: rollout: port {port}, at which --role_health asks, is in use before" in job.err
    job.assert_nothing_is_left()


def test_a_server_that_ends_before_the_trainers_fails_the_job_unless_it_may(start_roles: Start) -> None:
    train = "wait() if sys.argv[-1] == 'for_ever' else time.sleep(1)"
    job = start_roles(train, f"{SERVER}echo bye", "--", "for_ever")
    assert job.wait() == 1
    assert "exited with code 0, before the trainers did; it failed first" in job.err
    job.assert_nothing_is_left()
    may = start_roles(train, f"{SERVER}command echo bye", "--role_may_end=rollout", "--", "for_a_moment")
    assert may.wait() == 0, may.err
    assert "rollout on 127.0.0.1 ended with code 0, as it may" in may.err


def test_a_server_is_started_again_without_what_it_left_and_the_trainers_go_on(
    start_roles: Start, tmp_path: Path, port: int
) -> None:
    listen = f"python -m http.server {port}"  # which the server that ends leaves running, on the port
    left = f'(trap "" TERM; exec {listen}) &'
    serve = f"[ -e first ] && touch second && exec {listen}; touch first; {left} sleep 2; exit 3"
    job = start_roles(
        """
        import socket
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                is_second = os.path.exists('second')
                socket.create_connection(('127.0.0.1', int(sys.argv[-1]))).close()
            except OSError:
                is_second = False
            if is_second:
                say('there again')
                break
            time.sleep(0.05)
        """,
        SERVER + serve,
        "--role_restarts=rollout=2",
        "--report=report.json",
        "--",
        str(port),
    )
    assert job.wait() == 0, job.err
    assert job.out.count("there again") == 2
    assert "exited with code 3: starting it again (1 of 2 restarts)" in job.err
    assert "rollout: 1 server, started again 1 time" in job.err
    assert json.loads((tmp_path / "report.json").read_text())["servers"][0]["restarts"] == 1
    job.assert_nothing_is_left()


def test_a_trainer_that_fails_ends_the_servers_and_a_last_restart_is_the_end(start_roles: Start) -> None:
    words = 'trap "echo asked to end; exit 0" TERM; echo up; sleep 1000 & wait'
    job = start_roles("sys.exit(5)", SERVER + words)
    assert job.wait(AT_ONCE_S) == 5
    assert job.out.count("asked to end") <= 1  # the trainers may fail before the shell sets its trap
    assert "failed first" in job.err
    job.assert_nothing_is_left()
    (job.folder / "die.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    spent = start_roles("wait()", f"{SERVER}python die.py", "--role_restarts=rollout=2")
    assert spent.wait() == 128 + 9
    assert "was killed by SIGKILL (9): starting it again (1 of 2 restarts)" in spent.err
    assert "was killed by SIGKILL (9): starting it again in 1 s (2 of 2 restarts)" in spent.err
    assert "evidence: it was started again 2 times, as often as --role_restarts allows" in spent.err
