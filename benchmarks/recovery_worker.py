"""One rank of bench_recovery.py: trains with one tool, saves every ten steps, and notes what it does when.

python recovery_worker.py TOOL      in the folder of the run: ddp, nvrx or torchft; ours is recovery_ours.py

Each process has a file of its own in the folder: notes-HOST-PID, with a line of JSON for each note. A file
`raise-HOST` or `hang-HOST` makes the rank on that host fail in this way at its next step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

WIDTH, LAYERS, ROWS = 1024, 8, 8  # 8.4 million parameters: 101 MB with both states of AdamW, in float32
SAVE_EVERY = 10  # steps
LIMIT_S = 10.0  # limit of one collective, and of a step
HOST = socket.gethostname()
FOLDER = Path("checkpoints")


def begun_at() -> float:
    """Return when this process began, or was forked, in seconds since the epoch."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


class Notes:
    """The file in which this process notes what it does."""

    def __init__(self) -> None:
        self._file = Path(f"notes-{HOST}-{os.getpid()}").open("a", buffering=1)  # noqa: SIM115
        self.note("begun", at=begun_at())

    def note(self, what: str, *, step: int = 0, at: float | None = None, **more: float) -> None:
        note = {"what": what, "at": time.time() if at is None else at, "step": step, **more}
        self._file.write(json.dumps(note) + "\n")


class Trainer(Protocol):
    """A tool's loop. `step` is the number of steps that are done."""

    @property
    def step(self) -> int: ...

    def load(self) -> None:
        """Load the newest checkpoint, if there is one."""

    def train(self) -> None:
        """Do one step, which may fail: then `step` is as before."""

    def save(self) -> None:
        """Save, all ranks together."""


def model_and_rows() -> tuple[Any, Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers), torch.randn(ROWS, WIDTH)


class Ddp:
    """DistributedDataParallel, and torch.distributed.checkpoint. `beat` is called after each step."""

    def __init__(self, notes: Notes) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint  # what it needs is imported before, as ours is

        notes.note("imported")
        dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
        notes.note("groups")
        model, self._rows = model_and_rows()
        self._model = torch.nn.parallel.DistributedDataParallel(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.step = 0
        self.beat: Callable[[], object] = lambda: None

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self) -> None:
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.state_dict import set_state_dict

        latest = FOLDER / "latest"
        if not latest.exists():
            return
        self.step = int(latest.read_text())
        state = self._state()
        load(state, checkpoint_id=FOLDER / str(self.step))
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def train(self) -> None:
        self._model(self._rows).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.beat()

    def save(self) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint import save

        save(self._state(), checkpoint_id=FOLDER / str(self.step))
        if dist.get_rank() == 0:
            (FOLDER / "latest.new").write_text(str(self.step))
            (FOLDER / "latest.new").rename(FOLDER / "latest")


class Nvrx(Ddp):
    """The same, with the heartbeats of NVIDIA's fault tolerance."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(notes)
        from nvidia_resiliency_ext import fault_tolerance

        client = fault_tolerance.RankMonitorClient()
        client.init_workload_monitoring()
        self.beat = client.send_heartbeat


class TorchFt:
    """torchft: each host is a replica that others outlive; one that comes back gets its state from them."""

    def __init__(self, notes: Notes) -> None:
        import torch
        from torchft import Manager, Optimizer, ProcessGroupGloo

        notes.note("imported")
        model, self._rows = model_and_rows()
        plain = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def state() -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": plain.state_dict()}

        def take(given: dict[str, Any]) -> None:
            model.load_state_dict(given["model"])
            plain.load_state_dict(given["optimizer"])

        limit = timedelta(seconds=LIMIT_S)
        self._manager: Any = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            min_replica_size=1,
            load_state_dict=take,
            state_dict=state,
            replica_id=HOST,
            timeout=limit,
            hostname=HOST,
        )
        notes.note("groups")
        self._model, self._parameters = model, list(model.parameters())
        self._optimizer = Optimizer(self._manager, plain)

    @property
    def step(self) -> int:
        return int(self._manager.current_step())

    def load(self) -> None:
        """Do nothing: the state comes with the first step."""

    def train(self) -> None:
        import torch

        self._optimizer.zero_grad()
        self._model(self._rows).square().mean().backward()
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        flat = torch.cat([one.flatten() for one in gradients])
        self._manager.allreduce(flat).wait()
        parts = flat.split([one.numel() for one in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        self._optimizer.step()

    def save(self) -> None:
        """Save nothing: the state is with the other replicas."""


TOOLS: dict[str, Callable[[Notes], Trainer]] = {
    "ddp": Ddp,
    "nvrx": Nvrx,
    "torchft": TorchFt,
}


def fail_if_told(notes: Notes) -> None:
    """Fail, once, in the way that a file asks for."""
    for kind in ("raise", "hang"):
        told = Path(f"{kind}-{HOST}")
        if told.exists():
            told.unlink()
            notes.note("fault")
            if kind == "raise":
                raise RuntimeError("an error of the program's own")
            time.sleep(3600.0)


def train(make: Callable[[Notes], Trainer]) -> None:
    """Train for ever."""
    notes = Notes()
    FOLDER.mkdir(exist_ok=True)
    trainer = make(notes)
    trainer.load()
    notes.note("loaded", step=trainer.step)
    while True:
        fail_if_told(notes)
        before = trainer.step
        notes.note("step begins", step=before)
        trainer.train()
        if trainer.step == before:
            continue
        notes.note("step", step=trainer.step)
        if trainer.step % SAVE_EVERY == 0:
            trainer.save()
            notes.note("saved", step=trainer.step)


if __name__ == "__main__":
    train(TOOLS[sys.argv[1]])
