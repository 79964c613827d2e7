"""The endpoint for Prometheus, asked over real sockets by good clients and bad ones."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.output import prometheus
from dslaunch.launcher.output.prometheus import open_endpoint
from dslaunch.launcher.telemetry.gauges import all_names
from dslaunch.launcher.telemetry.telemetry import Telemetry
from dslaunch.launcher.wire.frames import Metrics
from tests.launcher.local_job import poll

CHECKOUT = Path(__file__).resolve().parents[3]
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


class Served:
    """The endpoint of a job with two ranks."""

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self.telemetry.begin({"name": "train"}, interval_s=1.0)
        self.url = open_endpoint(self.telemetry, "127.0.0.1", 0, interval_s=1.0)
        self.telemetry.begin_attempt((Origin("a", 0, 0, 0), Origin("b", 1, 1, 0)))
        self.port = urlsplit(self.url).port or 0

    def tell(self, **row: Any) -> None:
        self.telemetry.take_metrics("a", Metrics(0.0, {"0": row}, {}))
        self.telemetry.flush()

    def ask(
        self, path: str = "/metrics", *, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read().decode()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.telemetry.close()
    assert not [one for one in threading.enumerate() if one.name == "prometheus"]


def test_what_it_shows_can_be_read_in_both_formats(served: Served) -> None:
    served.tell(step=3, loss="nan", **{'a"\\\n\u00e9\ud800': 0.5})
    for headers, read in ({}, parse), (OPENMETRICS, parse_openmetrics):
        status, kind, text = served.ask(headers=headers)
        assert status == 200
        assert ("openmetrics" in kind) == bool(headers)
        samples = [one for family in read(text) for one in family.samples]
        assert {one.name for one in samples} <= all_names()
        assert [(one.labels, one.value) for one in samples if one.name == "dslaunch_step"] == [
            ({"host": "a", "rank": "0"}, 3.0)
        ]
        (reported,) = (one for one in samples if one.name == "dslaunch_reported")
        assert reported.labels["name"] == 'a"\\\n\u00e9?'


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("HEAD", "/metrics", 200),
        ("GET", "/metrics?x=1", 200),
        ("GET", "/../etc/passwd", 404),
        ("POST", "/metrics", 405),
    ],
)
def test_other_requests(served: Served, method: str, path: str, status: int) -> None:
    found, _, text = served.ask(path, method=method)
    assert found == status
    assert bool(text) == (method != "HEAD")


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"\0\xff\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"x" * 100_000,
        b"GET /metrics HTTP/1.1\r\n" * 9000,
    ],
    ids=["empty", "bytes", "old", "long line", "many lines"],
)
def test_what_is_no_request_is_refused(served: Served, request_: bytes) -> None:
    with served.connect() as client:
        with contextlib.suppress(OSError):
            client.sendall(request_)
        with contextlib.suppress(OSError):  # what it had not read makes a reset of it
            answer = client.recv(100)
            assert answer[:12] in (b"HTTP/1.1 400", b"")
    assert served.ask()[0] == 200


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=x.y", "\xe9;;,=,", "*/*", ""])
def test_an_accept_header_of_any_kind(served: Served, accept: str) -> None:
    status, kind, _ = served.ask(headers={"Accept": accept})
    assert status == 200
    assert kind.isprintable()


def test_numbers_are_new_soon_after_they_were_told(served: Served) -> None:
    served.tell(loss=1.0)
    served.ask()
    served.tell(loss=2.0)
    poll(lambda: 'dslaunch_loss{host="a",rank="0"} 2.0' in served.ask()[2], "the new loss", 5.0)


@pytest.mark.slow
def test_slow_clients_hold_up_neither_the_job_nor_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "CLIENT_S", 1.0)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(served.connect()) for _ in range(2 * prometheus.MAX_CLIENTS)]
        for client in clients:
            with contextlib.suppress(OSError):
                client.send(b"GET /metrics HT")
        began = time.monotonic()
        served.tell(loss=1.0)
        assert time.monotonic() - began < 0.5
        assert served.ask()[0] == 200
        for client in clients[-3:]:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b"", "it lost its connection"


def test_of_too_many_clients_the_oldest_lose_their_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "CLIENT_S", 60.0)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(served.connect()) for _ in range(prometheus.MAX_CLIENTS + 3)]
        assert served.ask()[0] == 200
        for client in clients[:3]:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""


@pytest.mark.slow
def test_two_thousand_requests_hold_up_no_job(served: Served) -> None:
    codes: list[int] = []

    def ask_often() -> None:
        for _ in range(500):
            codes.append(served.ask()[0])

    served.tell(loss=1.0)
    threads = [threading.Thread(target=ask_often) for _ in range(4)]
    for one in threads:
        one.start()
    longest_s = 0.0
    while any(one.is_alive() for one in threads):
        began = time.monotonic()
        served.tell(loss=1.0)
        longest_s = max(longest_s, time.monotonic() - began)
        threads[0].join(0.01)
    assert codes == [200] * 2000
    assert longest_s < 1.0


def test_a_port_that_is_taken_is_an_error(served: Served) -> None:
    with pytest.raises(
        LaunchError, match=f"--metrics_port=127.0.0.1:{served.port}: cannot listen there: Addr"
    ):
        open_endpoint(served.telemetry, "127.0.0.1", served.port, interval_s=1.0)
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1:0: cannot listen there: Cannot assign"):
        open_endpoint(served.telemetry, "192.0.2.1", 0, interval_s=1.0)


def test_without_its_package_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(prometheus, "import_module", gone)
    with pytest.raises(LaunchError, match=re.escape("pip install '.[prometheus]' in a clone")):
        open_endpoint(Telemetry(), "127.0.0.1", 0, interval_s=1.0)


def test_nobody_is_answered_when_the_job_has_ended() -> None:
    served = Served()
    with served.connect() as client:
        served.telemetry.close()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(10) == b""
    with pytest.raises(ConnectionRefusedError):
        served.connect()


def test_the_dashboard_asks_for_names_that_there_are() -> None:
    board = json.loads((CHECKOUT / "docs" / "examples" / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"dslaunch_\w+", target["expr"])
    }
    queries = [one["query"] for one in board["templating"]["list"] if isinstance(one.get("query"), str)]
    asked |= {name for query in queries for name in re.findall(r"dslaunch_\w+", query)}
    assert len(asked) > 10
    assert asked <= all_names()


def test_the_guide_knows_all_names_and_no_others() -> None:
    text = (CHECKOUT / "docs" / "launch" / "metrics.md").read_text()
    assert set(re.findall(r"\bdslaunch_\w+", text)) == all_names()
