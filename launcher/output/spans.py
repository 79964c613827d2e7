"""A job as spans for OpenTelemetry: the job, its attempts, and in each the phases of its start.

Only where the environment names the receiver, as the OpenTelemetry specification says, and its packages are
there. Spans are sent from a thread of OpenTelemetry's; the end of a job waits a moment for the last ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ..options.end import shown_url
from ..telemetry.telemetry import Telemetry

CLOSE_S = 3.0
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_INSTALL = "pip install '.[otel]' in a clone of dslaunch"
# Further events that a span of an attempt gets, besides failures of workers
_AS_EVENTS = ("straggler", "hang")


def send_spans(
    telemetry: Telemetry,
    environ: Mapping[str, str],
    *,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Send spans if the environment asks for them; `say` gets the receiver, or why there is none."""
    endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), "")
    if not endpoint or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return
    place = shown_url(endpoint) if endpoint.startswith(("http://", "https://")) else "that place"
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        say(f"no spans are sent to {place}: dslaunch speaks http/protobuf, and not {protocol}")
        return
    try:
        spans = SpanSink(environ, warn=lambda: warn(f"not all spans could be sent to {place}"))
    except ImportError:
        say(f"no spans are sent to {place}: the packages of OpenTelemetry are not there; {_INSTALL}")
        return
    except Exception as error:  # their errors about other variables of theirs
        say(f"no spans are sent to {place}: {type(error).__name__}: {error}")
        return
    telemetry.add(spans)
    say(f"spans of this job are sent to {place}")


class SpanSink:
    """A sink that makes spans of events."""

    def __init__(self, environ: Mapping[str, str], *, warn: Callable[[], None]) -> None:
        """`warn` is called once if some spans could not be sent. Errors: ImportError without the packages"""
        sdk = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        resources = import_module("opentelemetry.sdk.resources")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        self._trace = import_module("opentelemetry.trace")
        propagation = import_module("opentelemetry.trace.propagation.tracecontext")
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        logging.getLogger("opentelemetry").propagate = False  # `warn` reports failures in our words

        class Exporter(otlp.OTLPSpanExporter):  # type: ignore[name-defined, misc] # a module without types
            has_told = False

            def export(self, spans: Any) -> Any:
                result = super().export(spans)
                if result is not export.SpanExportResult.SUCCESS and not self.has_told:
                    self.has_told = True
                    warn()
                return result

        given = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "dslaunch"}
        self._provider = sdk.TracerProvider(resource=resources.Resource.create(given), shutdown_on_exit=False)
        self._provider.add_span_processor(export.BatchSpanProcessor(Exporter()))
        self._tracer = self._provider.get_tracer("dslaunch")
        carrier = {
            name: environ[name.upper()] for name in ("traceparent", "tracestate") if name.upper() in environ
        }
        self._parent = propagation.TraceContextTextMapPropagator().extract(carrier)
        self._job: Any = None
        self._attempt: Any = None
        self._phase_began_at = 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "job":
            self._job = self._begin(f"job {event.get('name', '')}", event, context=self._parent)
            for name in ("name", "user", "host", "launcher", "version"):
                self._job.set_attribute(f"dslaunch.{name}", str(event.get(name, "")))
        elif kind == "attempt":
            self._attempt = self._begin(f"attempt {event['attempt']}", event, parent=self._job)
            self._attempt.set_attribute("dslaunch.workers", len(event["workers"]))
            self._phase_began_at = event["at"]
        elif self._attempt is not None:
            self._take_of_attempt(kind, event)
        if kind == "end" and self._job is not None:
            self._end(self._job, event["at"], event["exit_code"])
            self._job = None

    def close(self) -> None:
        """Send the remaining spans; give up soon if the receiver does not take them."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _take_of_attempt(self, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "phase":
            phase = self._begin(event["phase"], {"at": self._phase_began_at}, parent=self._attempt)
            self._phase_began_at = max(self._phase_began_at, event["at"])
            phase.end(end_time=_ns(self._phase_began_at))
        elif kind in _AS_EVENTS or (kind == "exited" and event["code"]):
            told = {name: value for name, value in event.items() if isinstance(value, int | float | str)}
            self._attempt.add_event(kind, told, timestamp=_ns(event["at"]))
        elif kind in ("verdict", "end"):
            self._end(self._attempt, event["at"], event["exit_code"])
            self._attempt = None

    def _begin(self, name: str, event: Mapping[str, Any], *, parent: Any = None, context: Any = None) -> Any:
        if parent is not None:
            context = self._trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context=context, start_time=_ns(event["at"]))

    def _end(self, span: Any, at: float, exit_code: int) -> None:
        span.set_attribute("dslaunch.exit_code", exit_code)
        if exit_code:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, f"exit code {exit_code}"))
        span.end(end_time=_ns(at))


def _ns(at: float) -> int:
    return int(at * 1e9)
