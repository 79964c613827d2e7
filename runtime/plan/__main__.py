"""`python -m dslaunch.runtime.plan REQUEST`: rehearse a program as one rank; the launcher starts it.

REQUEST is JSON: `program` (its words: a script and arguments) and `is_module`, or `model`, the fields of a
`ModelRequest`; `device` ("cuda" or "cpu"), `device_bytes`, `rank`, `world_size` and `answer` (the file that
the answer is written to). The environment is that of the rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from .answer import answer_of
from .made_program import ModelRequest, made_program
from .program import Rehearsal, script


def main(request: dict[str, Any]) -> None:
    """Rehearse, and write the answer."""
    device = torch.device("cuda", 0) if request["device"] == "cuda" else torch.device("cpu")
    rehearsal = Rehearsal(
        device=device,
        device_bytes=request["device_bytes"],
        rank=request["rank"],
        world_size=request["world_size"],
    )
    if request.get("model"):
        program = made_program(ModelRequest(**request["model"]))
    else:
        path, *arguments = request["program"]
        program = script(path, arguments, is_module=request["is_module"])
    rehearsal.run(program)
    answer = json.dumps(answer_of(rehearsal))
    Path(request["answer"]).write_text(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what the program would do at its end belongs to a run


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
