"""A server that takes weights as vLLM's do, and the side of a trainer that sends them: the protocol of vLLM's
"weight transfer", with a socket in place of NCCL.

The server knows the names and shapes of its model. It refuses, by name: calls out of order, lists of other
lengths, an unknown name, another shape.
Source: vLLM's documentation, "Weight transfer" and vllm/distributed/weight_transfer
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from dslaunch.runtime.weights.digest import WeightsDigest

_AFTER = {"init": ("new", "ready"), "start": ("ready",), "update": ("started",), "finish": ("started",)}


class Refused(Exception):
    """What the server says."""


class StandIn:
    """The model of a server."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.weights: dict[str, Tensor] = {}
        self.version = ""
        self.damages: str | None = None  # a tensor that is damaged on its way
        self._state = "new"
        self._socket: socket.socket | None = None

    def answer(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        call = path.strip("/").split("_")[0]
        if self._state not in _AFTER[call]:
            raise Refused(f"{path} comes after {', '.join(_AFTER[call])}, and it is {self._state}")
        answer: dict[str, Any] = getattr(self, f"_{call}")(**given)
        return answer

    def _init(self, init_info: dict[str, Any]) -> dict[str, Any]:
        self._socket = socket.create_connection((init_info["master_address"], init_info["master_port"]))
        self._state = "ready"
        return {}

    def _start(self) -> dict[str, Any]:
        self._state, self.weights = "started", {}
        return {}

    def _update(self, update_info: dict[str, list[Any]]) -> dict[str, Any]:
        names, dtypes, shapes = (update_info[key] for key in ("names", "dtype_names", "shapes"))
        if not len(names) == len(dtypes) == len(shapes):
            raise Refused("lists of other lengths")
        for name, shape in zip(names, shapes, strict=True):
            if tuple(shape) != self.shapes.get(name):
                self._state = "ready"
                raise Refused(f"'{name}' {shape} is not of this model")
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            value = torch.empty(shape, dtype=getattr(torch, dtype))
            self._receive(value)
            if name == self.damages:
                value.view(-1)[-1] += 1
            self.weights[name] = value
        return {}

    def _receive(self, value: Tensor) -> None:
        view = memoryview(value.reshape(-1).view(torch.uint8).numpy())
        while view:
            assert self._socket is not None
            view = view[self._socket.recv_into(view) :]

    def _finish(self, weight_version: str) -> dict[str, Any]:
        if self.weights.keys() != self.shapes.keys():
            raise Refused(f"without {', '.join(sorted(self.shapes.keys() - self.weights.keys()))}")
        self._state, self.version = "ready", weight_version
        return WeightsDigest(self.weights.items()).tensors


@contextmanager
def served(model: StandIn) -> Iterator[str]:
    """Have it serve at a URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            try:
                code, answer = 200, model.answer(self.path, given)
            except Refused as error:
                code, answer = 400, {"error": str(error)}
            body = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Sender:
    """The trainer's side; rank 0 has a URL, the others iterate beside it."""

    def __init__(self, source: Any, url: str | None) -> None:
        self._source, self._url = source, url
        if url is None:
            return
        with socket.create_server(("127.0.0.1", 0)) as listening:
            info = {"master_address": "127.0.0.1", "master_port": listening.getsockname()[1]}
            self._post(
                "init_weight_transfer_engine", {"init_info": {**info, "rank_offset": 1, "world_size": 2}}
            )
            self._socket, _ = listening.accept()

    def send_weights(self) -> None:
        if self._url is None:
            for _ in self._source:
                pass
            return
        meta = self._source.metadata()
        update = {
            "names": [one.name for one in meta],
            "dtype_names": [str(one.dtype).removeprefix("torch.") for one in meta],
            "shapes": [list(one.shape) for one in meta],
        }
        failures: list[Refused] = []

        def ask() -> None:
            try:
                self._post("update_weights", {"update_info": update})
            except Refused as error:
                failures.append(error)

        self._post("start_weight_update", {})
        asking = threading.Thread(target=ask)
        asking.start()
        for place, (name, tensor) in enumerate(self._source):
            if place == 0:
                asking.join(timeout=0.2)  # a refusal comes at once
            if failures:
                raise failures[0]
            found = (name, tensor.dtype, tuple(tensor.shape), tensor.is_contiguous())
            if found != (*meta[place][:3], True):
                raise AssertionError(f"{found} is not {meta[place]}")
            self._socket.sendall(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        assert place == len(meta) - 1
        asking.join()
        received = self._post("finish_weight_update", {"weight_version": str(self._source.digest)})
        self._source.digest.check(received)

    def _post(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        try:
            with urlopen(Request(f"{self._url}/{path}", json.dumps(given).encode())) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as error:
            raise Refused(json.load(error)["error"]) from None
