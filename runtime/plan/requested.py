"""The rehearsal that a request of the launcher asks for."""

from __future__ import annotations

from typing import Any

import torch

from .made_program import ModelRequest, made_program
from .program import Rehearsal, script


def rehearsed(request: dict[str, Any], *, holds_files_back: bool) -> Rehearsal:
    """Run the program of the request to the end of its planned steps; __main__.py has the request's keys."""
    device = torch.device("cuda", 0) if request["device"] == "cuda" else torch.device("cpu")
    rehearsal = Rehearsal(
        device=device,
        device_bytes=request["device_bytes"],
        rank=request["rank"],
        world_size=request["world_size"],
        told=request["told"],
        holds_files_back=holds_files_back,
    )
    if request.get("model"):
        program = made_program(ModelRequest(**request["model"]))
    else:
        path, *arguments = request["program"]
        program = script(path, arguments, is_module=request["is_module"])
    rehearsal.run(program)
    return rehearsal
