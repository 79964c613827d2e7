"""The spans of a job, as a collector of OpenTelemetry gets them over HTTP."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.output import spans as spans_module
from dslaunch.launcher.output.spans import send_spans
from dslaunch.launcher.telemetry.telemetry import Telemetry

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector:
    """Keeps all spans by name."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.code = 200
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(data)
                for one in request.resource_spans:
                    for scope in one.scope_spans:
                        collector.spans.update({span.name: span for span in scope.spans})
                self.send_response(collector.code)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)  # OpenTelemetry reads it there
    yield made
    made.server.shutdown()
    made.server.server_close()


def run_job(environ: dict[str, str]) -> tuple[list[str], list[str]]:
    """A job of two attempts, of which the first one fails; returns what was said, and the warnings."""
    telemetry, said, warned = Telemetry(), [], []
    telemetry.begin({"name": "train", "host": "login"}, interval_s=1)
    send_spans(telemetry, environ, say=said.append, warn=warned.append)
    for code in (7, 0):
        telemetry.begin_attempt((Origin("a", 0, 0, 0),))
        telemetry.record_of_attempt("phase", phase="connected")
        telemetry.record_of_attempt("phase", phase="started")
        telemetry.record_of_attempt("exited", rank=0, host="a", code=code, signal=0)
        telemetry.record_of_attempt("verdict", exit_code=code)
    telemetry.record("end", exit_code=0, duration_s=1.0)
    telemetry.close()
    return said, warned


def test_a_job_its_attempts_and_their_phases_are_spans(collector: Collector) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "TRACEPARENT": f"00-{TRACE}-b7ad6b7169203331-01",
    }
    assert run_job(environ) == ([f"spans of this job are sent to {collector.url}"], [])
    spans = collector.spans
    assert set(spans) == {"job train", "attempt 0", "attempt 1", "connected", "started"}
    job, first = spans["job train"], spans["attempt 0"]
    assert job.trace_id.hex() == TRACE
    assert first.parent_span_id == job.span_id
    assert spans["started"].parent_span_id == spans["attempt 1"].span_id
    assert spans["connected"].end_time_unix_nano == spans["started"].start_time_unix_nano
    assert (first.status.code, spans["attempt 1"].status.code) == (2, 0)
    assert [one.name for one in first.events] == ["exited"]
    assert {one.key: one.value.string_value for one in job.attributes}["dslaunch.name"] == "train"


def test_a_collector_that_fails_is_said_once_and_holds_up_no_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans_module, "CLOSE_S", 1.0)
    collector.code = 400
    began = time.monotonic()
    _, warned = run_job({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})
    assert warned == [f"not all spans could be sent to {collector.url}"]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, []),
        ({"OTEL_SDK_DISABLED": "true"}, []),
        ({"OTEL_TRACES_EXPORTER": "none"}, []),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            ["no spans are sent to http://collector:4318: dslaunch speaks http/protobuf, and not grpc"],
        ),
    ],
)
def test_only_where_they_are_asked_for(environ: dict[str, str], said: list[str]) -> None:
    if environ:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://ada:pw@collector:4318/x", **environ}
    assert run_job(environ)[0] == said


def test_without_the_packages_it_is_said_what_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(spans_module, "import_module", gone)
    (said,) = run_job({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector"})[0]
    assert said.endswith(
        "the packages of OpenTelemetry are not there; pip install '.[otel]' in a clone of dslaunch"
    )
