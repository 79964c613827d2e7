"""What a machine with a GPU shows in nine minutes: is dslaunch right there, and how fast beside its peers?

    python -m tests.gpu first       in less than four minutes; `second`, the rest, takes five

The machine needs torch with CUDA and pytest, and no network: what else is imported comes out of .gpu/, which
`make gpu-bundle` fills where there is a network. With --fake the plan runs in small on the fake CUDA device.
Into --out come results.json and results.md, written anew after each line that a step prints, and a log of
what the steps said: what is known when the machine has to be given back is there.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from .line import END, found_in, is_right
from .plan import PARTS, PLAN, Step
from .prepared import ROOT, prepared
from .report import Report, outcome

LAST_S = 2.0  # of a step's limit, between being told to end and being ended
TICK_S = 0.1
FAKE_FACTOR = 4  # the fake device's work is a processor's


def main() -> int:
    """Return 0 if all steps of the parts succeed, peers aside."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all if none is given")
    parser.add_argument("--fake", action="store_true", help="in small, on the fake CUDA device of the tests")
    out = Path(os.environ.get("OUT") or "gpu-out")
    parser.add_argument("--out", type=Path, default=out, help="folder for what comes out; OUT, or gpu-out")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"{unknown[0]}: give one of {', '.join(PARTS)}")
    parts = given.parts or PARTS
    with ExitStack() as held:
        try:
            held.enter_context(held_alone(given.out))
        except OSError as error:
            parser.error(
                f"--out {given.out}: {error.strerror}; give a folder that can be made, or written to"
            )
        report = Report(given.out, name="-".join(parts))
        held.enter_context(ended_by_signals())
        run_steps(
            [step for part in parts for step in PLAN if step.part == part],
            held.enter_context(prepared(is_fake=given.fake)),
            is_fake=given.fake,
            report=report,
        )
    print(report.table(), end="")
    return 0 if all(result["ok"] for result in report.results) else 1


@contextmanager
def held_alone(out: Path) -> Iterator[None]:
    """Make the folder, and keep other runs out of it.

    Errors:  OSError if no file can be put there, or another run has it
    """
    out.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=out).close()
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(folder)
        raise OSError(error.errno, "another run writes there, which may be waited for") from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(folder)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End with what runs when told to: by a key, by another process, or as the terminal goes."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def end(number: int, _: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # once is enough
        sys.exit(f"told to end by {signal.Signals(number).name}")

    for one, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(one, end)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


# ---- steps


def run_steps(steps: Sequence[Step], environ: dict[str, str], *, is_fake: bool, report: Report) -> None:
    """Run one after the other; a step that may runs beside the one after it."""
    running: list[Running] = []
    try:
        for step in steps:
            result = report.add(step)
            if is_fake and step.only_real:
                result |= {"ok": True, "left_out": step.only_real}
                print(f"{step.part}: {step.name}: left out: {step.only_real}", flush=True)
                continue
            running.append(Running(step, environ, is_fake=is_fake, log=report.log_of(step), result=result))
            if not step.beside:
                watch(running, report)
                running.clear()
        watch(running, report)
    finally:
        for one in running:
            one.end()


def watch(running: Sequence[Running], report: Report) -> None:
    """Wait until all have ended, and write down what they say when they say it."""
    going = list(running)
    report.write()
    while going:
        time.sleep(TICK_S)
        has_news = [one.look() for one in going]
        for one in [one for one in going if one.has_ended]:
            going.remove(one)
            report.keep_log(one.step, one.log, one.result)
            print(one.said(), end="", flush=True)
        if any(has_news):
            report.write()


class Running:
    """A step's process, and what it has said."""

    def __init__(
        self, step: Step, environ: dict[str, str], *, is_fake: bool, log: Path, result: dict[str, Any]
    ) -> None:
        self.step, self.log, self.result = step, log, result
        self.limit_s = step.limit_s * (FAKE_FACTOR if is_fake else 1)
        self.has_ended = False
        self._start = time.monotonic()
        until = {END: str(self._start + self.limit_s - LAST_S)}
        with log.open("ab") as target:  # appending: its processes write to the same file
            self._process = subprocess.Popen(
                [sys.executable, "-m", *step.argv, *(step.small if is_fake else ())],
                cwd=ROOT,
                env={**environ, **step.environ, **until},
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # where this process is killed its end of the pipe closes, and the step's group is ended
        self._guard = subprocess.Popen(
            ["sh", "-c", f"read _; kill -s KILL -- -{self._process.pid}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def look(self) -> bool:
        """Take in what is new, and end it if it takes too long; return whether there is news."""
        status: int | str | None = self._process.poll()
        if status is None and time.monotonic() - self._start > self.limit_s - LAST_S:
            status = f"no end after {self.limit_s} s"
        if status is not None:
            self.end()
        before = len(self.result["lines"])
        self.result["lines"] = list(found_in(self.log.read_text(errors="replace").splitlines()))
        self.result["s"] = round(time.monotonic() - self._start, 1)
        if status is not None:
            lines = self.result["lines"]
            self.result |= {"ok": status == 0 and all(map(is_right, lines)), "status": status}
            self.has_ended = True
        return self.has_ended or len(self.result["lines"]) > before

    def end(self) -> None:
        """Nothing of its group is left."""
        self._guard.kill()
        self._guard.communicate()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=LAST_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def said(self) -> str:
        """How it ended, for who watches; of a failure the last lines."""
        result = self.result
        said = f"{self.step.part}: {self.step.name}: {outcome(result)}, {result['s']} s of {self.limit_s}\n"
        return said + "".join(f"    {line}\n" for line in ([] if result["ok"] else result["last"]))


if __name__ == "__main__":
    sys.exit(main())
