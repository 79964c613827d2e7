"""An endpoint for Prometheus: the present numbers of a job, at http://ADDRESS:PORT/metrics.

One thread with one event loop serves all clients. A slow client is disconnected after a moment, and if there
are too many clients, the oldest is; a page is made at most once an event, however often it is asked for. The
job never waits for a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from ..errors import LaunchError
from ..run_state.metric_table import Family
from ..telemetry.gauges import Gauges, Sample, shown_name
from ..telemetry.telemetry import Telemetry

MAX_CLIENTS = 32
CLIENT_S = 5.0  # for a whole request and its answer
MAX_REQUEST_BYTES = 16 << 10
FRESH_S = 0.25  # a page may be so old before it is made again
OLD_S = 5.0  # a page may be so old if no event came meanwhile: only the silence of hosts changes then
CLOSE_S = 2.0
_TURNS = 20  # turns of the loop, at the end
_TEXT = "text/plain; charset=utf-8"


def open_endpoint(telemetry: Telemetry, address: str, port: int, *, interval_s: float) -> str:
    """Serve the numbers of `telemetry` until it is closed; return the URL.

    Errors: LaunchError if the port cannot be had, or prometheus-client is not there
    """
    try:
        client = import_module("prometheus_client")
        import_module("prometheus_client.exposition")
    except ImportError:
        raise LaunchError(
            "--metrics_port needs the package prometheus-client, which is not installed; pip install "
            "'.[prometheus]' in a clone of dslaunch"
        ) from None
    listener = _listen(address, port)
    endpoint = PrometheusEndpoint(Gauges(telemetry, interval_s=interval_s), listener, client)
    telemetry.add(endpoint)
    return endpoint.url


def _listen(address: str, port: int) -> socket.socket:
    shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        family, _, _, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(MAX_CLIENTS)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "this name is no address"
        raise LaunchError(
            f"--metrics_port={shown}: cannot listen there: {why}; give another one, or 0 for any that is free"
        ) from None
    return listener


class PrometheusEndpoint:
    """A sink that shows the last numbers to every client of `listener`."""

    def __init__(self, gauges: Gauges, listener: socket.socket, client: Any) -> None:
        self._gauges, self._listener = gauges, listener
        self._pages = Pages(gauges, client)
        address, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{address}]' if ':' in address else address}:{port}/metrics"
        self._loop = asyncio.new_event_loop()
        # Errors of a client that went away are not reported
        self._loop.set_exception_handler(lambda *_: None)
        self._is_closing = asyncio.Event()
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # the oldest first
        self._thread = threading.Thread(target=self._serve, name="prometheus", daemon=True)
        self._thread.start()

    def take(self, event: Any) -> None:
        self._gauges.version += 1

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._is_closing.set)
        self._thread.join(CLOSE_S)

    # Methods of the endpoint's thread.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve_until_told())
        finally:
            self._loop.close()
            self._listener.close()

    async def _serve_until_told(self) -> None:
        server = await asyncio.start_server(self._meet, sock=self._listener, limit=MAX_REQUEST_BYTES)
        await self._is_closing.wait()
        # first: a closed server loses the clients that it has just accepted
        self._loop.remove_reader(self._listener.fileno())
        for _ in range(_TURNS):  # a client that has just come is known a few turns later
            for task, writer in list(self._clients.items()):
                writer.transport.abort()
                task.cancel()
            await asyncio.sleep(0)
        server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MAX_CLIENTS:
            oldest = next(iter(self._clients))
            self._clients.pop(oldest).transport.abort()
            oldest.cancel()
        task = asyncio.current_task()
        if task is None:
            return
        self._clients[task] = writer
        try:
            await asyncio.wait_for(self._answer(reader, writer), CLIENT_S)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._clients.pop(task, None)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            request = b""
        status, kind, body = self._pages.answer(request)
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode("latin-1", "replace"))
        if not request.startswith(b"HEAD "):
            writer.write(body)
        await writer.drain()
        writer.write_eof()
        # Wait until the client has read all: to close with unread bytes would reset the connection
        await reader.read(MAX_REQUEST_BYTES)


class Pages:
    """Answers to requests. A page is made again only when there is something new."""

    def __init__(self, gauges: Gauges, client: Any) -> None:
        """`client`: the module prometheus_client."""
        self._gauges, self._client = gauges, client
        self._made: dict[str, tuple[int, float, bytes]] = {}  # by content type

    def answer(self, request: bytes) -> tuple[str, str, bytes]:
        """Return status, content type and body."""
        line, _, rest = request.decode("latin-1").partition("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "400 Bad Request", _TEXT, b"this is no request\n"
        if words[0] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", _TEXT, b"only GET\n"
        place = words[1].partition("?")[0]
        if place == "/":
            return "200 OK", _TEXT, b"a job of dslaunch; its numbers are at /metrics\n"
        if place != "/metrics":
            return "404 Not Found", _TEXT, b"the numbers are at /metrics\n"
        accept = ",".join(
            value for name, _, value in (one.partition(":") for one in rest.split("\r\n"))
            if name.strip().lower() == "accept"
        )  # fmt: skip
        kind, body = self._page(accept)
        return "200 OK", kind, body

    def _page(self, accept: str) -> tuple[str, bytes]:
        choose = self._client.exposition.choose_encoder
        try:
            encode, kind = choose(accept)
        except Exception:  # a version that is none
            encode, kind = choose("")
        kind = kind if kind.isprintable() and len(kind) < 200 else _TEXT
        now = time.monotonic()
        version, made_at, body = self._made.get(kind, (-1, 0.0, b""))
        age_s = now - made_at
        if version < 0 or age_s > (FRESH_S if version != self._gauges.version else OLD_S):
            version = self._gauges.version
            body = encode(_Once(self._client, self._gauges.families()))
            self._made = {**(self._made if len(self._made) < 4 else {}), kind: (version, now, body)}
        return kind, body


class _Once:
    """Families as prometheus_client takes them."""

    def __init__(self, client: Any, families: Mapping[Family, Sequence[Sample]]) -> None:
        self._client, self._families = client, families

    def collect(self) -> Iterable[Any]:
        for family, samples in self._families.items():
            made = self._client.Metric(family.name, family.about, family.kind)
            for labels, value in samples:
                made.add_sample(shown_name(family), labels, value)
            yield made
