"""Run one program with dslaunch or with DeepSpeed, and keep what its ranks printed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import launch_peers
from benchmarks.launch_peers import DEEPSPEED_FOLDER, DSLAUNCH
from benchmarks.team import EXTENSIONS_FOLDER

PROGRAMS = Path(__file__).with_name("programs")
TOOLS = ("dslaunch", "DeepSpeed")
COMPILED = ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder")  # by DeepSpeed, on CPUs
END_S = 15.0  # for a launcher that was told to end; then all of its processes are killed
# The line of an error below its traceback, or of one that ended a process; not the lines of code above it.
ERROR = re.compile(
    r"^(?:\[rank\d+\]: |\S+:\d+ \| )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)|^\s*what\(\):\s+(.*)"
)
NO_CAUSE = re.compile(r"Connection (?:reset|closed)|ChildFailedError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of a program: words of the launcher before it, its own words after it.

    `is_by_launcher`: the launcher is what the report is about
    """

    ranks: int = 2
    is_by_launcher: bool = False
    files: tuple[tuple[str, str], ...] = ()  # name and text of files beside the program
    options: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of all launches of a program, which end with the first that fails.

    `code`: exit code of the last launch, None if it was ended after `limit_s`. `output`: everything it said.
    """

    tool: str
    code: int | None
    limit_s: float
    output: str
    facts: list[dict[str, Any]] = field(default_factory=list)

    def of(self, key: str) -> list[Any]:
        """Values of this fact, of all ranks that printed it."""
        return [one[key] for one in self.facts if key in one]

    @property
    def error(self) -> str:
        """The first error without paths; one that tells of another rank's end only if there is no other."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        errors = [found[1] or found[2] for line in lines if (found := ERROR.search(line))]
        causes = [error for error in errors if not NO_CAUSE.search(error)]
        chosen = next(iter(causes or errors or lines[-1:]), "")
        return without_paths(re.sub(r"\[enforce fail.*? vs \d+\. ", "", chosen))


def without_paths(text: str) -> str:
    """Leave of each path the name of the file."""
    return re.sub(r"(?<![\w.])/[\w./+-]*/", "", text)


def why_no_deepspeed() -> str:
    """Compile what DeepSpeed needs at its first use; return why it cannot run here, empty if it can."""
    missing = launch_peers.why_no_deepspeed()
    if missing:
        return missing
    program = (
        "import deepspeed; from deepspeed.accelerator import get_accelerator as here; "
        f"[here().create_op_builder(name).load() for name in {COMPILED}]"
    )
    _remove_locks()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=_environment() | _deepspeed_env(),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.stderr.strip()[-1500:] if done.returncode else ""


def _deepspeed_env() -> dict[str, str]:
    return {
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(DEEPSPEED_FOLDER),
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS_FOLDER),
    }


def deepspeed_version() -> str:
    text = (DEEPSPEED_FOLDER / "deepspeed" / "git_version_info_installed.py").read_text()
    found = re.search(r"version\s*=\s*'([\d.]+)", text)
    return found[1] if found else ""


class DeepSpeedRanks:
    """The process of deepspeed_ranks.py, which begins with the first launch."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def launch(self, program: str, launch: Launch, folder: Path, limit_s: float) -> tuple[int | None, str]:
        """Return exit code, None if the limit has passed, and output."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.field.deepspeed_ranks"],
                env=_environment() | _deepspeed_env(),
                cwd=PROGRAMS.parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise AssertionError("the ranks' parent has no pipes")
        asked = {
            "program": str(PROGRAMS / f"{program}.py"),
            "words": launch.words,
            "ranks": launch.ranks,
            "folder": str(folder),
            "limit_s": limit_s,
        }
        _remove_locks()
        log = folder / "output.txt"
        log.unlink(missing_ok=True)
        process.stdin.write(f"{json.dumps(asked)}\n")
        process.stdin.flush()
        code = json.loads(process.stdout.readline())
        return code, log.read_text(encoding="utf-8", errors="replace")


def run(
    program: str,
    launches: tuple[Launch, ...],
    tool: str,
    folder: Path,
    *,
    limit_s: float,
    ranks: DeepSpeedRanks | None = None,
) -> Run:
    """Run all launches of the program in this folder, which must be empty.

    `ranks` starts those of DeepSpeed; without it, and for reports of the launcher, its own launcher does.
    """
    facts: list[dict[str, Any]] = []
    code: int | None = 0
    output = ""
    for number, launch in enumerate(launches):
        for name, text in launch.files:
            (folder / name).write_text(text)
        if tool == "DeepSpeed" and ranks is not None and not launch.is_by_launcher:
            code, output = ranks.launch(program, launch, folder, limit_s)
        else:
            command, env = _command(program, launch, tool)
            code, output = _ended(command, env, folder, limit_s)
        facts += [{**one, "launch": number} for one in facts_in(output)]
        if code != 0:
            break
    return Run(tool=tool, code=code, limit_s=limit_s, output=output, facts=facts)


def facts_in(output: str) -> list[dict[str, Any]]:
    """The JSON objects that programs print in lines of their own, behind a prefix or not."""
    found = []
    for line in output.splitlines():
        start = line.find('{"rank": ')
        if start >= 0:
            with contextlib.suppress(json.JSONDecodeError):  # another rank's words came between
                found.append(json.loads(line[start:]))
    return found


def _environment() -> dict[str, str]:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("DSLAUNCH_", "ACCELERATE_"))
    }
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # compilers and ninja of this environment, for what DeepSpeed compiles at its first use
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    return env


def _command(program: str, launch: Launch, tool: str) -> tuple[list[str], dict[str, str]]:
    words = [*launch.options, "--num_gpus", str(launch.ranks)]
    script = [str(PROGRAMS / f"{program}.py"), *launch.words]
    if tool == "dslaunch":
        quick = [] if launch.is_by_launcher else ["--preload=torch"]
        return [DSLAUNCH, "--drop_in=always", *quick, *words, *script], _environment()
    _remove_locks()
    port = ["--master_port", str(_free_port())]  # another job of this machine may have the usual one
    command = [sys.executable, str(DEEPSPEED_FOLDER / "bin" / "deepspeed"), *port, *words, *script]
    return command, _environment() | _deepspeed_env()


def _remove_locks() -> None:
    """Remove the locks of ranks that were ended while they loaded an extension, for which others wait."""
    for lock in EXTENSIONS_FOLDER.rglob("lock"):
        lock.unlink(missing_ok=True)


def _ended(
    command: list[str], env: Mapping[str, str], folder: Path, limit_s: float
) -> tuple[int | None, str]:
    """Return exit code and output of the command; the code is None if the limit has passed."""
    log = folder / "output.txt"
    with log.open("w") as said:
        job = subprocess.Popen(
            command,
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGTERM)
            deadline = time.monotonic() + END_S
            while job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
