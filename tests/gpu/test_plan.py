"""What is asked of a machine with a GPU, and what becomes of a step that fails."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import site
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_cuda_kernels import FIRST_USE
from tests.exhaustive import few
from tests.fake_cuda.build import can_be_built
from tests.small_disk import small_disk_at

from . import __main__ as plan_runner, prepared as preparation
from .__main__ import LAST_S, held_alone, main, run_steps
from .bundle import LIMIT_MIB, MIB, python_of, sizes
from .nccl_ranks import contexts_of
from .plan import PARTS, PLAN, Step
from .prepared import ROOT, is_for_this_python, prepared
from .report import Report

LIMIT_S = 20 + LAST_S
SHORT_S = 1 + LAST_S
DEADLINE_S = 60.0
WAITS = "import signal\nsignal.pause()"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_ends_in_time_and_its_programs_exist(part: str) -> None:
    steps = [step for step in PLAN if step.part == part]
    assert 0 < sum(step.limit_s for step in steps if not step.beside) <= PARTS[part]
    for step, after in pairwise(steps):
        assert not step.beside or (not after.beside and step.limit_s <= after.limit_s), step.name
    assert not steps[-1].beside
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert importlib.util.find_spec(step.argv[0]) is not None
        for word in step.argv[1:]:
            assert not word.endswith(".py") or (ROOT / word).is_file(), word


def test_every_step_belongs_to_a_part() -> None:
    assert {step.part for step in PLAN} == set(PARTS)


def results_of(
    tmp_path: Path, sources: Mapping[str, str], *, is_fake: bool = False, **more: Any
) -> dict[str, dict[str, Any]]:
    """By name, of steps that run these programs one after the other."""
    folder, out = tmp_path / "programs", tmp_path / "out"
    folder.mkdir(exist_ok=True)
    out.mkdir(exist_ok=True)
    steps = []
    for number, (name, source) in enumerate(sources.items()):
        (folder / f"program_{number}.py").write_text(source)
        given = {"limit_s": SHORT_S if source == WAITS else LIMIT_S, **more}
        steps.append(Step("first", name, "what it is", argv=(f"program_{number}",), **given))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    report = Report(out, name="first")
    run_steps(steps, environ, is_fake=is_fake, report=report)
    assert json.loads((out / "results-first.json").read_text())["results"] == report.results
    return {result["step"]: result for result in report.results}


RIGHT = 'print(\'{"name": "x", "right": true}\')'
FAILURES = {
    "a missing package": ("import no_such_package", 1),
    "a failure": ("raise SystemExit(3)", 3),
    "wrong values": ('print(\'{"name": "x", "right": false}\')', 0),
    "an error that is told": ('print(\'{"name": "x", "error": "no such device"}\')', 0),
    "a crash": ("import os\nos.kill(os.getpid(), 11)", -11),
    "no end": (WAITS, f"no end after {SHORT_S} s"),
}


@pytest.mark.slow
def test_steps_go_on_after_one_that_fails_and_all_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = {name: source for name, (source, _) in FAILURES.items()}
    found = results_of(tmp_path, {**sources, "the last": RIGHT})
    last = found.pop("the last")
    assert (last["ok"], last["status"], last["lines"]) == (True, 0, [{"name": "x", "right": True}])
    assert {name: result["status"] for name, result in found.items()} == {
        name: status for name, (_, status) in FAILURES.items()
    }
    assert not any(result["ok"] for result in found.values())
    assert capsys.readouterr().out.count("FAILED") == len(FAILURES)
    out = tmp_path / "out"
    assert "No module named 'no_such_package'" in (out / "log-first.txt").read_text()
    assert (
        "| a missing package | failed ModuleNotFoundError: No module named 'no_such_package' |"
        in (out / "results-first.md").read_text()
    )
    assert "| first | a failure | what it is | FAILED (3) |" in (out / "results-first.md").read_text()
    assert sorted(one.name for one in out.iterdir()) == [
        "log-first.txt",
        "results-first.json",
        "results-first.md",
    ]


def test_a_full_disk_is_told_once_and_the_table_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk_at(tmp_path / "out", "size=8k") as out:
        report = Report(out, name="first")
        for part in ("one", "other"):
            result = report.add(Step("first", part, "what it is", argv=(), limit_s=LIMIT_S))
            result |= {"ok": True, "lines": [{"name": "x", "text": "y" * 9000}]}
            report.write()
        assert (
            capsys.readouterr().out
            == f"{out}: No space left on device: what follows is here alone, not there\n"
        )
        assert "| first | other | what it is | ok |" in report.table()


def test_a_folder_for_results_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [sys.executable, "-m", "tests.gpu", "first", "--out", str(tmp_path / "file" / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert "Not a directory; give a folder that can be made" in done.stderr


@pytest.mark.parametrize("why", ["Read-only file system", "another run writes there"])
def test_a_folder_for_results_that_cannot_be_written_to_is_refused(tmp_path: Path, why: str) -> None:
    out = tmp_path / "out"
    words = [sys.executable, "-m", "tests.gpu", "first", "--out", str(out)]
    with small_disk_at(out, "ro") if why.startswith("Read") else held_alone(out):
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
    assert why in done.stderr


@pytest.mark.slow
def test_what_a_peer_cannot_do_is_no_failure(tmp_path: Path) -> None:
    told = 'print(\'{"name": "deepspeed:1", "peer": true, "error": "no such module"}\')'
    assert results_of(tmp_path, {"speed": told})["speed"]["ok"]


CHECKS = """
import os, signal, sys
from tests.gpu import checks
from tests.gpu.checks import Check, run_checks
from tests.gpu.line import tell

checks.OTHERS_S = 0.5

def fail():
    raise ValueError("of this check")

def fail_on_one():
    fail() if os.environ["RANK"] == "1" else signal.pause()

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def be_right():
    tell("right", ranks=os.environ["WORLD_SIZE"])

sys.exit(run_checks([
    Check("fails", fail), Check("hangs", signal.pause, share=0.01), Check("one of two fails", fail_on_one, 2),
    Check("crashes", crash), Check("a peer's", fail, is_peers=True), Check("is right", be_right),
]))
"""


@pytest.mark.slow
def test_checks_that_raise_hang_or_crash_stop_no_other(tmp_path: Path) -> None:
    result = results_of(tmp_path, {"checks": CHECKS}, limit_s=DEADLINE_S)["checks"]
    told = [(line["name"], line.get("error", "").partition(" after ")[0]) for line in result["lines"]]
    assert told == [
        ("fails", "rank 0: ValueError: of this check"),
        ("hangs", "no end of rank 0"),
        ("one of two fails", "rank 1: ValueError: of this check"),
        ("crashes", "rank 0 was ended by signal 11"),
        ("a peer's", "rank 0: ValueError: of this check"),
        ("right", ""),
    ]
    assert result["status"] == 4  # the peer's failure is not ours
    assert (
        "in _is_right" in (tmp_path / "out" / "log-first.txt").read_text()
    )  # where the one that hangs stands


@pytest.mark.slow
def test_a_step_that_may_runs_beside_the_next_and_both_end_before_the_third(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("slow", "beside")}
    until = "import pathlib, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)\n"
    slow = until.format(str(places["beside"])) + f"pathlib.Path({str(places['slow'])!r}).touch()"
    (tmp_path / "slow_one.py").write_text(slow)
    (tmp_path / "next_one.py").write_text(f"open({str(places['beside'])!r}, 'w')")
    (tmp_path / "third_one.py").write_text(f"open({str(places['slow'])!r})")
    steps = [
        Step("first", name, "", LIMIT_S, (f"{name}_one",), beside=name == "slow")
        for name in ("slow", "next", "third")
    ]
    report = Report(tmp_path, name="first")
    run_steps(steps, {**os.environ, "PYTHONPATH": str(tmp_path)}, is_fake=False, report=report)
    assert [result["ok"] for result in report.results] == [True] * 3


@pytest.mark.slow
def test_what_the_fake_device_cannot_answer_is_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"kernels": "raise SystemExit(3)"}
    found = results_of(tmp_path, source, is_fake=True, only_real="it has no such units")
    assert found["kernels"]["ok"]
    assert capsys.readouterr().out == "first: kernels: left out: it has no such units\n"
    table = (tmp_path / "out" / "results-first.md").read_text()
    assert "| first | kernels | what it is | left out: it has no such units | 0.0 |" in table


@pytest.mark.slow
def test_on_the_fake_device_a_step_is_small(tmp_path: Path) -> None:
    source = {"x": "import json, sys\nprint(json.dumps({'name': 'x', 'given': sys.argv[1:]}))"}
    for is_fake, given in ((True, ["--small"]), (False, [])):
        found = results_of(tmp_path, source, is_fake=is_fake, small=("--small",))
        assert found["x"]["lines"] == [{"name": "x", "given": given}]


SAYS_AND_WAITS = """
import json, os, signal
print(json.dumps({"name": "rate", "GB/s": 3, "pid": os.getpid()}), flush=True)
signal.pause()
"""
RUNS = """
import tests.gpu.__main__ as runner
from tests.gpu.plan import Step
runner.PLAN = [Step("first", "slow", "what it is", 100, ("says_and_waits",))]
runner.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    few(
        [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
        lambda how: how in (signal.SIGKILL, signal.SIGTERM),
    ),
)
def test_what_a_step_has_said_is_written_when_the_run_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    """The machine may be gone before the step ends. No process is left that keeps its GPU."""
    (tmp_path / "says_and_waits.py").write_text(SAYS_AND_WAITS)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    argv = [sys.executable, "-c", RUNS, "first", "--fake", "--out", str(tmp_path)]
    results, table = tmp_path / "results-first.json", tmp_path / "results-first.md"
    until = time.monotonic() + DEADLINE_S
    runner = subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not (results.exists() and "rate" in results.read_text()):
            assert time.monotonic() < until
            assert runner.poll() is None
    finally:
        runner.send_signal(how)
        _, said = runner.communicate()
    (result,) = json.loads(results.read_text())["results"]
    (line,) = result["lines"]
    step = line.pop("pid")
    assert line == {"name": "rate", "GB/s": 3}
    assert "| first | slow | what it is | not ended |" in table.read_text()
    assert said == ("" if how == signal.SIGKILL else f"told to end by {how.name}\n")
    while is_there(step):
        assert time.monotonic() < until


def is_there(pid: int) -> bool:
    """A process that has ended and that nothing waits for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def put_wheel(path: Path, files: Mapping[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)


def put_damaged_wheel(path: Path) -> None:
    put_wheel(path, {"before_the_damage.py": "print('here')", "after.py": "x"})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("damaged.py", "y" * 9999)
        start = packed.getinfo("damaged.py").header_offset + 30 + len("damaged.py")
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * 9)


@pytest.mark.slow
def test_wheels_that_cannot_be_unpacked_or_imported_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = tmp_path / "bundle" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / "cut-1.0-py3-none-any.whl").write_bytes(b"PK")
    put_damaged_wheel(wheels / "damaged-1.0-py3-none-any.whl")
    packages = tmp_path / "bundle" / "deepspeed.tgz"
    with tarfile.open(packages, "w:gz") as packed:
        packed.add(__file__, arcname="deepspeed")
    packages.write_bytes(packages.read_bytes()[:999])
    put_wheel(wheels / "whole_one-1.0-py3-none-any.whl", {"whole_one.py": "print('here')"})
    broken = {"torch/__init__.py": "raise ImportError('libcudart.so.13: no such file')"}
    put_wheel(wheels / "dslaunch-1.0-py3-none-any.whl", broken)
    steps = [
        Step("first", "setup", "", LIMIT_S, ("tests.gpu.machine",)),
        Step("first", "next", "", LIMIT_S, ("whole_one",)),
        Step("first", "last", "", LIMIT_S, ("before_the_damage",)),
    ]
    monkeypatch.setattr(preparation, "BUNDLE", tmp_path / "bundle")
    monkeypatch.setattr(plan_runner, "PLAN", steps)
    monkeypatch.setattr("sys.argv", ["gpu", "first", "--out", str(tmp_path)])
    assert main() == 1
    said = capsys.readouterr().out
    assert "cut-1.0-py3-none-any.whl: left out: " in said
    assert "damaged-1.0-py3-none-any.whl: left out: " in said
    assert "deepspeed.tgz: left out: " in said
    assert "No module named before_the_damage |" in said
    assert "| GPU | error ImportError: libcudart.so.13: no such file |" in said
    assert "first: next: ok" in said


BACKEND = """
import zipfile
FILES = {
    "dslaunch.py": "",
    "dslaunch-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: dslaunch\\nVersion: 1.0\\n",
    "dslaunch-1.0.dist-info/WHEEL":
        "Wheel-Version: 1.0\\nGenerator: us\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "dslaunch-1.0.dist-info/RECORD": "",
}
def build_wheel(folder, *_):
    with zipfile.ZipFile(f"{folder}/dslaunch-1.0-py3-none-any.whl", "w") as packed:
        for name, text in FILES.items():
            packed.writestr(name, text)
    return "dslaunch-1.0-py3-none-any.whl"
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [True, False])
def test_beside_a_damaged_wheel_dslaunch_is_built_with_the_packages_of_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "unpacked"
    wheels.mkdir()
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend_of_ours"\n'
        '[project]\nname = "dslaunch"\nversion = "1.0"\n'
    )
    put_wheel(wheels / "backend_of_ours-1.0-py3-none-any.whl", {"backend_of_ours.py": BACKEND})
    (put_damaged_wheel if is_damaged else partial(put_wheel, files={}))(
        wheels / "dslaunch-1.0-py3-none-any.whl"
    )
    monkeypatch.setattr(preparation, "BUNDLE", tmp_path)
    monkeypatch.setattr(preparation, "ROOT", tmp_path)
    path = preparation.install(preparation.bundled(), folder)
    assert path[0] == str(folder / "backend_of_ours-1.0-py3-none-any.whl")
    assert (Path(path[-1]) / "dslaunch.py").is_file() == is_damaged


@contextmanager
def as_another_user() -> Iterator[None]:
    """As one who may read less than root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(before)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("nothing", ""),
        ("a file", "Not a directory: the bundle is left out\n"),
        ("an empty folder", "No such file or directory: the bundle is left out\n"),
        ("another user's", "Permission denied: the bundle is left out\n"),
    ],
)
def test_a_bundle_that_cannot_be_read_is_told_and_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    told: str,
) -> None:
    bundle = tmp_path / ".gpu"
    monkeypatch.setattr(preparation, "BUNDLE", bundle)
    if what == "a file":
        bundle.touch()
    elif what != "nothing":
        bundle.mkdir()
    if what == "another user's":
        (bundle / "wheels").mkdir(mode=0)
    with as_another_user() if what == "another user's" else nullcontext():
        assert preparation.bundled() == []
    said = capsys.readouterr().out
    assert said == (f"{bundle / 'wheels'}: {told}" if told else "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with prepared(is_fake=False):
        assert (
            f"no dslaunch here, and no packages in {bundle}: run `make gpu-bundle`" in capsys.readouterr().out
        )


@pytest.mark.parametrize("why", ["No such file or directory", "Read-only file system"])
def test_where_home_cannot_be_written_to_steps_have_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    own = tmp_path / "home"
    monkeypatch.setenv("HOME", str(own))
    monkeypatch.setattr(preparation, "BUNDLE", tmp_path / "none")
    with (
        small_disk_at(own, "ro") if why.startswith("Read") else nullcontext(),
        prepared(is_fake=True) as environ,
    ):
        assert os.access(environ["HOME"], os.W_OK)
        assert environ["HOME"] != str(own)
        assert environ["PYTHONUSERBASE"] == site.getuserbase()
    assert not Path(environ["HOME"]).exists()
    assert f"HOME, {own}: {why}: " in capsys.readouterr().out
    own.mkdir(exist_ok=True)
    with prepared(is_fake=True) as environ:
        assert environ["HOME"] == str(own)


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("hjson-3.1.0-py3-none-any.whl", True),
        (f"a-1-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-linux_x86_64.whl", True),
        (f"a-1-cp3{sys.version_info.minor - 1}-abi3-linux_x86_64.whl", True),
        (f"a-1-cp3{sys.version_info.minor + 1}-abi3-linux_x86_64.whl", False),
        (f"a-1-cp3{sys.version_info.minor + 1}-cp3{sys.version_info.minor + 1}-linux_x86_64.whl", False),
    ],
)
def test_a_wheel_is_of_this_python_or_of_the_stable_abi_of_an_older_one(name: str, is_ours: bool) -> None:
    assert is_for_this_python(name) == is_ours


def test_compilers_find_what_is_installed_beside_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    with prepared(is_fake=True) as environ:
        assert environ["PATH"].split(os.pathsep) == ["/usr/bin", str(Path(sys.executable).parent)]


@pytest.mark.parametrize(
    ("lines", "found", "said"),
    [
        ("7, GPU-a\n8, GPU-b\n9, GPU-a\n", {7: 1, 8: 1}, ""),
        ("7, GPU-a\n8, GPU-a\n8, GPU-b\n", {7: 1, 8: 2}, ""),
        ("3070, GPU-a\n", {}, "nvidia-smi names none of [7, 8]: 3070, GPU-a"),
    ],
)
def test_the_gpus_that_processes_compute_on_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, found: dict[int, int], said: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'end'\n{lines}end\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert contexts_of([7, 8]) == (found, said)


@pytest.mark.parametrize(("mib", "fits"), [(LIMIT_MIB - 3, True), (LIMIT_MIB, False)])
def test_what_is_to_be_carried_is_told_with_its_size(tmp_path: Path, mib: int, fits: bool) -> None:
    for name, size in (("code.py", 2), ("a.whl", mib)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size * MIB)
    said, is_little = sizes([tmp_path / "code.py"], [tmp_path / "a.whl"])
    assert is_little == fits
    assert said.startswith(
        f"the checkout, 2.0 MiB, and .gpu, {mib}.0 MiB, are {'less' if fits else 'more'} than 64 MiB"
    )
    assert f"{mib}.0 MiB  a.whl" in said


def test_a_shim_is_not_taken_for_a_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for folder, text in (("shim", "exit 127"), ("real", f'exec {sys.executable} "$@"')):
        (tmp_path / folder).mkdir()
        program = tmp_path / folder / f"python{version}"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'shim'}:{tmp_path / 'real'}:/usr/bin:/bin")
    assert python_of(version) == str(tmp_path / "real" / f"python{version}")
    assert python_of("3.1") is None


def test_the_first_use_of_the_kernels_is_measured_by_a_program_that_has_all_it_names() -> None:
    """It runs on a GPU alone."""
    tree = ast.parse(FIRST_USE)
    known = {
        one.asname or one.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in node.names
    }
    known |= {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    used = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert used <= known | {"print"}


@pytest.mark.parametrize(("cuda", "is_built"), [("None", True), ("'13.0'", False)])
def test_there_is_no_fake_device_beside_a_torch_for_true_ones(
    tmp_path: Path, cuda: str, is_built: bool
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\ncuda: Optional[str] = {cuda}\n")
    why_not = can_be_built(tmp_path)
    assert (why_not is None) == is_built
    assert is_built or "this torch is built for CUDA 13.0" in str(why_not)
