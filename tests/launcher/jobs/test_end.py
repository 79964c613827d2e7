"""Who is told of a job's end, and by what: --on_end, --webhook; and --metrics_port of whole jobs."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import socketserver
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dslaunch.launcher.errors import EXIT_MISTAKE
from dslaunch.launcher.options.end import EndOptions, without_secrets
from dslaunch.launcher.run import job_end, run_job
from dslaunch.launcher.run.job_end import tell_end
from tests.launcher.detached_job import job as known
from tests.launcher.local_job import Start, poll

KEEP = "cat > end.json; echo $DSLAUNCH_JOB_NAME $DSLAUNCH_EXIT_CODE >> ends"


class Hook:
    """A server that keeps what is posted to it, and answers with `codes`, one after the other."""

    def __init__(self) -> None:
        self.codes = [200]
        self.got: list[tuple[str, dict[str, str], Any]] = []
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                hook.got.append((self.path, dict(self.headers), json.loads(data)))
                self.send_response(hook.codes[min(len(hook.got), len(hook.codes)) - 1])
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.place = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.slow
def test_both_get_how_the_job_ended_once_for_all_attempts(start: Start, tmp_path: Path, hook: Hook) -> None:
    url = f"http://ada:pass@{hook.place}/hooks/SECRET?key=1"
    job = start(
        "sys.exit(7)",
        *("--num_gpus", "2", "--max_restarts", "1", "--min_uptime", "0", "--log_dir", "logs"),
        *("--on_end", KEEP, "--webhook", url, "--events", "events"),
    )
    assert job.wait() == 7
    end = json.loads((tmp_path / "end.json").read_text())
    assert (tmp_path / "ends").read_text() == "train 7\n"
    (posted,) = hook.got
    assert posted[0] == "/hooks/SECRET?key=1"
    assert posted[1]["Authorization"] == "Basic YWRhOnBhc3M="
    assert posted[2] == end
    assert end["event"] == "end"
    assert end["exit_code"] == 7
    assert (end["name"], end["hosts"], end["ranks"], end["attempts"]) == ("train", ["localhost"], 2, 2)
    assert end["verdict"]["culprit"]["code"] == 7
    assert Path(end["log_folder"]).parent == tmp_path / "logs"
    assert "SECRET" not in json.dumps(end) + (tmp_path / "events").read_text() + job.err
    assert "pass@" not in json.dumps(end)


@pytest.mark.slow
def test_what_fails_is_said_and_changes_no_exit_code(start: Start, tmp_path: Path) -> None:
    job = start(
        "say('done')",
        *("--num_gpus", "1", "--on_end", "echo no mail; exit 3"),
        *("--webhook", "http://ada:pass@127.0.0.1:9/SECRET"),
    )
    assert job.wait() == 0
    assert "dslaunch: warning: --on_end: ended with code 3; it printed: no mail\n" in job.err
    assert "dslaunch: warning: --webhook: http://127.0.0.1:9: Connection refused\n" in job.err
    assert "SECRET" not in job.err
    assert "pass" not in job.err


@pytest.mark.slow
def test_it_runs_after_an_interrupt_of_a_detached_job(start: Start, tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    words = ("--num_gpus=1", "--detach", "--name", "far", "--on_end", KEEP)
    job = start("open('up', 'w').close(); wait()", *words, env=env)
    poll((tmp_path / "up").exists, "the worker")
    os.kill(known(tmp_path, "far")["pid"], signal.SIGINT)
    poll((tmp_path / "ends").exists, "the command")
    poll(lambda: (tmp_path / "ends").read_text().endswith("\n"), "its words")
    assert (tmp_path / "ends").read_text() == "far 130\n"
    job.assert_nothing_is_left()


@pytest.mark.slow
def test_a_signal_for_workers_ends_nothing_while_the_command_runs(start: Start, tmp_path: Path) -> None:
    job = start(
        "sys.exit(4)", "--num_gpus=1", "--on_end", "touch begun; read -r line < go; echo $line > ends"
    )
    os.mkfifo(tmp_path / "go")
    poll((tmp_path / "begun").exists, "the command")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        job.signal(number)
    poll(lambda: all(f"{name} (" in job.err for name in ("SIGUSR1", "SIGUSR2", "SIGQUIT")), "the warnings")
    (tmp_path / "go").write_text("done\n")
    assert job.wait() == 4
    assert (tmp_path / "ends").read_text() == "done\n"
    assert "warning: SIGUSR1 (10): no worker runs that it could be passed on to" in job.err
    job.assert_nothing_is_left()


@pytest.mark.slow
def test_a_mistake_is_told_too_and_a_job_that_is_only_shown_is_not(start: Start, tmp_path: Path) -> None:
    job = start("", "--hostfile", "missing", "--on_end", KEEP)
    assert job.wait() == EXIT_MISTAKE
    assert "missing" in json.loads((tmp_path / "end.json").read_text())["error"]
    (tmp_path / "ends").unlink()
    job = start("", "--num_gpus=1", "--dry_run", "--on_end", KEEP)
    assert job.wait() == 0
    assert not (tmp_path / "ends").exists()


@pytest.mark.slow
def test_numbers_are_served_while_the_job_runs(start: Start, tmp_path: Path) -> None:
    job = start("say('up'); wait()", "--num_gpus=2", "--metrics_port=0", "--metrics_interval=0.1")
    job.wait_for("up", times=2)
    (url,) = re.findall("http://127.0.0.1:[0-9]+/metrics", job.err)

    def text() -> str:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())

    poll(lambda: "dslaunch_host_memory_bytes{" in text(), "numbers of the host")
    assert "dslaunch_workers_running 2.0" in text()
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


# Without a job.


def told(end: EndOptions) -> list[str]:
    said: list[str] = []
    event = {"name": "t", "exit_code": 0, "duration_s": 1.0, "log_folder": None}
    tell_end(end, event, warn=said.append)
    return said


def test_a_command_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_end, "COMMAND_S", 0.3)
    began = time.monotonic()
    said = told(EndOptions(command="echo $$; exec sleep 60"))
    assert time.monotonic() - began < 5
    (found,) = re.findall("ended after 0.3 s, its time; it printed: ([0-9]+)", said[0])
    with pytest.raises(ProcessLookupError):
        os.kill(int(found), 0)


def test_what_a_command_leaves_running_or_prints_without_end_holds_up_nothing() -> None:
    began = time.monotonic()
    assert told(EndOptions(command="sleep 5 & exit 0")) == []
    (said,) = told(EndOptions(command="head -c 3000000 /dev/zero | tr '\\0' x; sleep 5 & exit 2"))
    assert time.monotonic() - began < 4
    assert said.startswith("--on_end: ended with code 2; it printed: xxx")
    assert len(said) < 3000


@pytest.mark.parametrize("comes", ["before its events are closed", "before it runs"])
def test_an_interrupt_of_a_job_that_has_ended_does_not_leave_it_out(
    monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    ran: list[int] = []

    def interrupt(place: str) -> None:
        if place == comes:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # where Python looks for signals

    def tell(_options: Any, _console: Any, code: int, **_: Any) -> None:
        interrupt("before it runs")
        ran.append(code)

    monkeypatch.setattr(run_job, "no_worker_signals", nullcontext)
    monkeypatch.setattr(run_job, "_begin_events", lambda *_: None)
    monkeypatch.setattr(run_job, "_run", lambda *_: 0)
    monkeypatch.setattr(run_job, "_tell_end", tell)
    telemetry = SimpleNamespace(
        flush=lambda: interrupt("before its events are closed"), record=lambda *_, **__: None, close=bool
    )
    console: Any = SimpleNamespace(telemetry=telemetry, has_begun=True)
    options: Any = SimpleNamespace(end=SimpleNamespace(is_on=True), dry_run=False)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert run_job.run_with(options, console) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran == [0]


def test_an_interrupt_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert told(EndOptions(command="sleep 20")) == ["--on_end: given up by SIGINT"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "num_tries", "said"),
    [
        ([204], 1, []),
        ([500, 200], 2, []),
        ([503, 503], 2, ["it answered 503"]),
        ([404], 1, ["it answered 404"]),
        ([302], 1, ["it answered 302"]),
    ],
)
def test_a_webhook_is_tried_twice_where_that_may_help(
    hook: Hook, monkeypatch: pytest.MonkeyPatch, codes: list[int], num_tries: int, said: list[str]
) -> None:
    monkeypatch.setattr(job_end, "WEBHOOK_PAUSE_S", 0.0)
    hook.codes = codes
    found = told(EndOptions(webhook=f"http://{hook.place}/SECRET"))
    assert found == [f"--webhook: http://{hook.place}: {why}" for why in said]
    assert len(hook.got) == num_tries


def test_a_webhook_that_never_answers_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(job_end, "WEBHOOK_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        said = told(EndOptions(webhook=f"http://{place}/SECRET"))
    assert said == [f"--webhook: http://{place}: no answer within 0.5 s"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "it closed the connection without an answer"),
        (b"220 mail.example.org ready\r\n", "its answer is not HTTP"),
    ],
)
def test_a_webhook_that_is_none_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, why: str
) -> None:
    monkeypatch.setattr(job_end, "WEBHOOK_PAUSE_S", 0.0)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data = b""
            while not data.endswith(b"}\n"):  # all of it: what is left unread would reset the connection
                data += self.request.recv(1 << 16)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_address[1]}"
        found = told(EndOptions(webhook=f"http://{place}/SECRET"))
        server.shutdown()
    assert found == [f"--webhook: http://{place}: {why}"]


def test_a_url_stands_nowhere_with_what_may_be_secret_in_it() -> None:
    words = [
        "-H",
        "x",
        "--web",
        "https://u:p@hooks.example/S",
        "--webhook=http://[::1]:5/S",
        "t.py",
        "--webhook",
    ]
    assert without_secrets(words) == [
        *(
            "-H",
            "x",
            "--web",
            "https://hooks.example/...",
            "--webhook=http://[::1]:5/...",
            "t.py",
            "--webhook",
        )
    ]
