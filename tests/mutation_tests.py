"""The tests near a mutation, from the nearest on, and what they say of it."""

from __future__ import annotations

import contextlib
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.kernels.sanitizers import compiled
from tests.mutation_sites import Mutation, Site

MARKER = "DSLAUNCH_MUTATION"  # in the environment of all that the tests of a mutation start
MAX_NAMING = 12  # test files that name what is changed
QUICK_S = 2  # a test that fails within it waited for nothing, so a busy machine is no reason
STUCK_S = 45  # a test that ran as long when its group's time was over is tried on the code as it was
MIN_STAGE_S = 10  # pytest needs as long to begin
NO_TESTS = 5  # pytest's status
WRONG_ARGUMENTS = 4
RED_LINE = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\s]+(?:\[.*?\](?= - |$))?)?)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one pytest said: `test` is the first that failed, or the one that ran when its time was over."""

    kind: str  # passed, red, limit
    test: str = ""
    is_quick: bool = False
    stuck_s: float = 0.0
    status: int = 0


class Judge:
    """Makes a mutation, runs the tests near it and takes it back."""

    def __init__(
        self, root: Path, *, red_before: Mapping[Mutation, str], stage_limit_s: float, limit_s: float
    ) -> None:
        self._root = root
        self._red_before = red_before
        self._stage_limit_s = stage_limit_s
        self._limit_s = limit_s
        listed = subprocess.run(
            ["git", "ls-files", "tests"], cwd=root, capture_output=True, text=True, check=True
        )
        self._texts = {
            name: (root / name).read_text()
            for name in sorted(listed.stdout.splitlines())
            if re.search(r"/test_\w+\.py$", name)
        }

    def __call__(self, site: Site) -> dict[str, Any]:
        """Return the verdict, with the test that went red, its stage and the seconds."""
        begin = time.monotonic()
        stuck: dict[str, float] = {}
        stages: list[str] = []
        with _mutated(self._root, site) as is_built:
            if not is_built:
                return self._verdict("red", begin, test="the compiler", stages=["build"])
            for stage, arguments in self._stages(site).items():
                limit_s = min(self._stage_limit_s, self._limit_s - (time.monotonic() - begin))
                if not arguments:
                    continue
                if limit_s < MIN_STAGE_S:
                    stages.append(f"{stage}: limit")
                    continue
                outcome = self._pytest(arguments, limit_s=limit_s)
                if outcome.kind == "red" and not self._is_red_again(outcome, stage):
                    stages.append(f"{stage}: unsteady {outcome.test}")
                    continue
                stages.append(f"{stage}: {outcome.kind}")
                if outcome.kind == "red":
                    return self._verdict("red", begin, test=outcome.test, stages=stages)
                if outcome.kind == "limit" and outcome.stuck_s > STUCK_S:
                    stuck[outcome.test] = outcome.stuck_s
        for test, stuck_s in stuck.items():
            if self._pytest([test], limit_s=stuck_s).kind == "passed":
                return self._verdict("timeout", begin, test=test, stages=stages)
        is_whole = not any(stage.endswith(": limit") for stage in stages)
        return self._verdict("survived" if is_whole else "unfinished", begin, stages=stages)

    def _is_red_again(self, outcome: Outcome, stage: str) -> bool:
        """Whether the test fails alone, too: one that waits may fail because the machine is busy."""
        if outcome.status == WRONG_ARGUMENTS:
            return stage != "red before"  # of those that are there: a conftest that cannot be imported
        if "::" not in outcome.test or outcome.is_quick:
            return True
        again = self._pytest([outcome.test], limit_s=self._stage_limit_s)
        return again.kind != "passed"

    @staticmethod
    def _verdict(verdict: str, begin: float, *, stages: list[str], test: str = "") -> dict[str, Any]:
        seconds = round(time.monotonic() - begin)
        return {"verdict": verdict, "test": test, "seconds": seconds, "stages": stages}

    def _stages(self, site: Site) -> dict[str, list[str]]:
        """Return the arguments for pytest, of each group of tests."""
        stem, mirror = Path(site.file).stem, _mirror(self._root, site.file)
        names = [name for name in self._texts if name.startswith(f"{mirror}/")]
        nouns = [stem.strip("_")]
        if site.file.endswith(".cpp"):  # several are behind one module: kernels/disk/file.cpp, kernels.disk
            nouns.append(Path(site.file).parent.name)
        own = [name for name in names if re.match(rf"test_({'|'.join(nouns)})(_\w+)?\.py$", Path(name).name)]
        naming = self._naming(site, mirror, without=own)
        if mirror == "tests":  # not all there are
            names = [name for name in names if Path(name).parent == Path(mirror)]
        rest = [name for name in names if name not in (*own, *naming)]
        before = self._red_before.get(site.mutation, "")
        return {
            "red before": [before] if before else [],
            "own": own,
            "naming": naming,
            "folder": ["-n", "2", "--dist", "loadfile", *rest] if rest else [],
        }

    def _naming(self, site: Site, mirror: str, *, without: list[str]) -> list[str]:
        """Return the test files that name the module or the class, then those that name the function."""
        module = Path(site.file).with_suffix("")
        module = module.parent if module.name == "__init__" else module
        folder, stem = module.parent.name, module.name
        names = [name for name in site.mutation.function.split(".") if name and name[:2] != "__"]
        classes = [rf"\b{name}\b" for name in names if name.lstrip("_")[0].isupper()]
        sure = re.compile("|".join([rf"\b{folder}[./]{stem}\b", rf"\bimport {stem}\b", *classes]))
        used = re.compile("|".join(rf"(\.|import.*\b){name}\b|\b{name}\(" for name in names) or "(?!)")
        near = "/".join(Path(mirror).parts[:2])  # elsewhere another function may have the name

        def rank(name: str) -> int:
            text = self._texts[name]
            return 0 if sure.search(text) else 1 if name.startswith(near) and used.search(text) else 2

        def nearness(name: str) -> tuple[int, int, str]:
            return rank(name), -len(Path(os.path.commonpath([name, mirror])).parts), name

        naming = [name for name in self._texts if name not in without and rank(name) < 2]
        return sorted(naming, key=nearness)[:MAX_NAMING]

    def _pytest(self, arguments: list[str], *, limit_s: float) -> Outcome:
        """Run tests until the first fails or the time is over; no process of theirs is left."""
        options = [
            "-x",
            "-v",
            "--tb=short",
            "-m",
            "not exhaustive",
            "--durations=0",
            f"--durations-min={QUICK_S}",
        ]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        env = {"DSLAUNCH_LAB_NAME": "mutations", **os.environ, MARKER: str(os.getpid())}
        with tempfile.NamedTemporaryFile("w+", suffix=".txt", errors="replace") as output:
            process = subprocess.Popen(
                command, cwd=self._root, env=env, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                last = Path(output.name).read_text(errors="replace").rpartition("\n")[2]
                silent_s = time.time() - Path(output.name).stat().st_mtime
                test = last.strip() if "::" in last else ""
                return Outcome(kind="limit", test=test, stuck_s=silent_s if test else 0.0)
            finally:
                _end(process)
            text = Path(output.name).read_text(errors="replace")
        if status in (0, NO_TESTS):
            return Outcome(kind="passed")
        red = RED_LINE.search(text.rpartition("short test summary info")[2])
        test = red[1] if red else f"pytest ended with {status}: {text[-200:]}"
        is_quick = re.search(rf"^[\d.]+s \w+ +{re.escape(test)}$", text, re.MULTILINE) is None
        return Outcome(kind="red", test=test, is_quick=is_quick, status=status)


def _mirror(root: Path, file: str) -> str:
    """Return the folder of the tests for a folder of the code, or the nearest above it."""
    folder = Path("tests", str(Path(file).parent).removeprefix("package/dslaunch/"))
    while not (root / folder).is_dir():
        folder = folder.parent
    return str(folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let pytest end what it has set up, then end all that has its environment."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if other.environ().get(MARKER) == str(os.getpid()):
                other.kill()
    process.wait()


@contextlib.contextmanager
def _mutated(root: Path, site: Site) -> Iterator[bool]:
    """Change the file, and put it back on every path; tells whether it could be built."""
    path = root / site.file
    source, stat = path.read_bytes(), path.stat()
    try:
        path.write_bytes(site.changed(source))
        with _built(root) if path.suffix == ".cpp" else _without_bytecode(path) as is_built:
            yield is_built
    finally:
        path.write_bytes(source)
        if path.suffix == ".py":  # what was compiled of C++ is older than its source now, so it is built anew
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@contextlib.contextmanager
def _without_bytecode(path: Path) -> Iterator[bool]:
    """Leave no bytecode of another version: a file of equal size and time would be taken for it."""

    def forget() -> None:
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            cached.unlink(missing_ok=True)

    forget()
    py_compile.compile(str(path), doraise=True)  # processes of tests may not write it
    try:
        yield True
    finally:
        forget()


@contextlib.contextmanager
def _built(root: Path) -> Iterator[bool]:
    """Build the compiled module of the changed sources into the place of the installed one."""
    try:
        module = compiled(root / "build" / "mutations", "-DCMAKE_BUILD_TYPE=Release")
    except subprocess.CalledProcessError:
        yield False
        return
    probe = [
        sys.executable,
        "-c",
        "import sys, dslaunch.kernels; print(sys.modules['dslaunch.kernels._C'].__file__)",
    ]
    installed = Path(subprocess.run(probe, check=True, capture_output=True, text=True).stdout.strip())
    kept = installed.with_suffix(".kept")
    installed.rename(kept)  # what runs keeps the file that it has loaded
    try:
        shutil.copy(module, installed)
        yield True
    finally:
        kept.replace(installed)
