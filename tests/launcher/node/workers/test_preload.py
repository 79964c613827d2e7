"""--preload: the workers are forks of one process that has imported,
and the program notices nothing but the time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import venv
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.node.workers.preload import Imports, Preloader, PreloadTimes, Unpreloaded
from dslaunch.launcher.options.option import read
from dslaunch.launcher.options.start import StartOptions
from tests.launcher.controller.test_stacks import SHOW
from tests.launcher.local_job import Job, Start, poll

pytestmark = pytest.mark.slow

BIG = (
    "import os\nNUMBERS = list(range(10))\nHERE = os.getpid()\n"  # a module that knows where it was imported
)


@pytest.fixture
def start(start: Start, tmp_path: Path) -> Start:
    """Starts a job of this worker text, which can import `big`, with these options and words of its own."""
    (tmp_path / "big.py").write_text(BIG)
    return lambda worker, *words: start(worker, *words, "--", "--lr", "1")


def test_all_ranks_share_one_import(start: Start) -> None:
    job = start("import big; say(big.HERE, os.getppid(), os.getpid())", "--preload=big", "--num_gpus=3")
    assert job.wait() == 0, job.err
    seen = [job.lines(rank)[0].split() for rank in range(3)]
    assert len({importer for importer, _, _ in seen}) == 1, "imported once"
    assert len({pid for _, _, pid in seen}) == 3
    assert len({parent for _, parent, _ in seen}) == 1
    assert seen[0][0] not in (seen[0][1], seen[0][2]), "children of the agent, not of the one that imported"


@pytest.mark.exhaustive
def test_the_program_finds_everything_as_ever(tmp_path: Path) -> None:
    """Arguments, paths, __main__, environment, open files, its line in ps, and what it spawns and pickles."""
    (tmp_path / "big.py").write_text(BIG)
    seen = []
    for options in ([], ["--preload=big"], ["--preload=big", "--stack_on_hang=0", "--timings"]):
        more = (
            "\n"
            "    print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0)), "
            "sys.gettrace(), os.getcwd())"
        )
        (tmp_path / "show.py").write_text(SHOW + more)
        job = Job(tmp_path, [*options, "--no_local_rank", "show.py", "--a=b c", ""])
        try:
            assert job.wait() == 0, job.err
        finally:
            job.end()
        first, second = job.lines(0)
        found = json.loads(first)
        found[2] = found[10] = None  # the modules are more, and that is the purpose
        for name in (
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "DSLAUNCH_TEST_JOB",
            "DSLAUNCH_PLACE_FILE",
            "DSLAUNCH_METRICS_PIPE",
            "DSLAUNCH_MILESTONES",
        ):  # of one job
            found[8].pop(name, None)
        seen.append((found, second))
    for place, (found, second) in enumerate(seen[1:]):
        assert dict(enumerate(found)) == dict(enumerate(seen[0][0])), place
        assert second == seen[0][1], place


def test_a_module_is_run_as_one(start: Start, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "go.py").write_text(
        "import sys, big; print(sys.argv, __spec__.name, __name__, sys.path[0], flush=True)"
    )
    seen = []
    for options in ([], ["--preload=big"]):
        job = Job(tmp_path, [*options, "--module", "package.go", "x"])
        try:
            assert job.wait() == 0, job.err
            seen.append(job.lines(0))
        finally:
            job.end()
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("worker", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_exit_code_is_the_program_s(worker: str, code: int, start: Start) -> None:
    assert start(worker, "--preload=big").wait() == code


@pytest.mark.parametrize("worker", ["def f(): return 1 / 0\nf()", "x = = 1"])
def test_a_traceback_begins_where_the_program_begins(worker: str, start: Start) -> None:
    shown = []
    for options in ([], ["--preload=big"]):
        job = start(worker, *options)
        assert job.wait() == 1
        shown.append([line for line in job.err.splitlines() if " | " in line])
    assert shown[0]
    assert shown[0] == shown[1]


def test_the_program_s_frame_is_the_outermost_one(start: Start) -> None:
    """As for warnings that blame the caller of a module, and for what asks whether it can seek in stdout."""
    worker = """
        import inspect, os, warnings
        warnings.warn("of whom", stacklevel=2)
        say(len(inspect.stack()), sys._getframe().f_back, sys.stdout.seekable(), sys.stderr.seekable())
        say("sitecustomize" in sys.modules, "DSLAUNCH_PRELOAD" in os.environ, len(sys.path))
        say(sorted(globals()))
    """
    seen = []
    for options in ([], ["--preload=big"], ["--preload=big", "--stack_on_hang=0"], ["--stack_on_hang=0"]):
        job = start(worker, *options)
        assert job.wait() == 0, job.err
        assert "sys:1: UserWarning: of whom" in job.err
        seen.append(job.lines(0))
    assert seen[0][0].endswith(" None False False")
    assert seen == [seen[0]] * len(seen)


def test_what_is_registered_for_the_end_happens(start: Start) -> None:
    worker = """
        import atexit, threading
        atexit.register(say, 'at exit')
        threading.Thread(target=lambda: (time.sleep(0.1), say('thread'))).start()
    """
    job = start(worker, "--preload=big")
    assert job.wait() == 0
    assert job.lines(0) == ["thread", "at exit"]


def test_random_numbers_differ_between_ranks(start: Start) -> None:
    job = start(
        "import random, numpy; say(random.random(), numpy.random.rand())",
        "--preload=random,numpy",
        "--num_gpus=2",
    )
    assert job.wait() == 0, job.err
    first, second = (job.lines(rank)[0].split() for rank in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize(("seed", "is_kept"), [(1 << 40, False), (5, True)])
def test_what_torch_draws_differs_between_ranks_unless_a_module_gave_it_a_seed(
    seed: int, is_kept: bool, start: Start, tmp_path: Path
) -> None:
    """What torch chooses for itself has more than 32 bits."""
    (tmp_path / "torch.py").write_text(
        "import os\n"
        "class default_generator:\n"
        f"    value = {seed}\n"
        "    initial_seed = lambda: default_generator.value\n"
        "    seed = lambda: setattr(default_generator, 'value', os.getpid())\n"
    )
    program = "import torch; say(torch.default_generator.value, os.getpid())"
    job = start(program, "--preload=torch", "--num_gpus=2")
    assert job.wait() == 0, job.err
    for rank in range(2):
        drawn, pid = job.lines(rank)[0].split()
        assert drawn == (str(seed) if is_kept else pid)


@pytest.mark.exhaustive
def test_torch_draws_other_numbers_on_each_rank_as_in_processes_of_their_own(start: Start) -> None:
    job = start("import torch; say(torch.rand(1).item())", "--preload=torch", "--num_gpus=2")
    assert job.wait() == 0, job.err
    first, second = (job.lines(rank)[0] for rank in range(2))
    assert first != second


@pytest.mark.parametrize("in_child", ["True", "False"])
def test_a_module_that_asks_for_gpus_is_imported_by_each_worker(
    in_child: str, start: Start, tmp_path: Path
) -> None:
    """`torch.cuda.is_available()` starts the driver, which CUDA's own flag tells in a child alone."""
    (tmp_path / "torch.py").write_text(
        "import os\n"
        "class cuda:\n"
        "    pid = os.getpid()\n"
        "    is_initialized = lambda: False\n"
        f"    _is_in_bad_fork = lambda: os.getpid() != cuda.pid and {in_child}\n"
    )
    job = start("import torch; say(torch.cuda.pid == os.getpid())", "--preload=torch", "--num_gpus=2")
    assert job.wait() == 0, job.err
    assert [job.lines(rank) for rank in range(2)] == [[in_child]] * 2
    assert ("importing initializes CUDA" in job.err) == (in_child == "True")


def test_the_main_thread_has_the_number_of_its_process(start: Start) -> None:
    worker = "import os, threading; say(threading.main_thread().native_id == os.getpid())"
    job = start(worker, "--preload=threading", "--num_gpus=2")
    assert job.wait() == 0, job.err
    assert job.lines(0) == ["True"]


def test_stacks_can_be_asked_for(start: Start) -> None:
    job = start("def stuck():\n    say('ready')\n    wait()\nstuck()", "--preload=big", "--stack_on_hang=0")
    job.wait_for("ready")
    job.signal(signal.SIGQUIT)
    job.wait_for_err(" in stuck\n")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow: pip install --group drop-in")
def test_the_thread_of_pyarrows_jemalloc_is_none_that_a_worker_misses(start: Start) -> None:
    work = """
        import gc, pyarrow
        table = pyarrow.table({"x": list(range(200_000))})
        del table
        gc.collect()
        say("pyarrow" in before, sum(pyarrow.array([1] * 100_000).to_pylist()))
    """
    job = start("before = set(sys.modules)\n" + textwrap.dedent(work), "--preload=pyarrow", "--num_gpus=2")
    assert job.wait() == 0, job.err
    assert [job.lines(rank) for rank in (0, 1)] == [["True 100000"]] * 2
    assert "--preload" not in job.err


def test_a_module_that_starts_threads_is_not_forked_from(start: Start, tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        BIG + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    job = start("import threads; say(threads.HERE == os.getpid())", "--preload=threads", "--num_gpus=2")
    assert job.wait() == 0, job.err
    said = (
        "--preload=threads: importing starts 1 threads, which a fork would lose; each "
        "worker imports for itself"
    )
    assert said in job.err
    assert [job.lines(rank) for rank in range(2)] == [["True"], ["True"]]


def test_a_module_that_changes_where_modules_are_found_is_not_forked_from(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "paths.py").write_text(BIG + "import sys\nsys.path.insert(0, '/first')\n")
    job = start("import paths; say(sys.path[0], paths.HERE == os.getpid())", "--preload=paths")
    assert job.wait() == 0, job.err
    assert "--preload=paths: importing puts another folder in front of sys.path" in job.err
    assert job.lines(0) == ["/first True"]


@pytest.mark.parametrize(
    ("name", "text", "is_shared"),
    [
        ("lib/early.pth", "import os; os.environ.get('RANK')", False),
        ("lib/early.pth", "import os; os.environ.get('FRANKLY')", True),
        ("lib/sitecustomize.py", "import os\nos.environ.get('WORLD_SIZE')", False),
        ("before/sitecustomize.py", "import os\nos.environ.get('LOCAL_RANK')", False),
    ],
)
def test_what_python_runs_at_its_start_and_asks_for_the_rank_is_run_with_it(
    name: str, text: str, is_shared: bool, start: Start, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (tmp_path / "lib").symlink_to(site)
    (tmp_path / "before").mkdir()
    words = f"python={tmp_path}/venv/bin/python env.PYTHONPATH={tmp_path}/before"
    (tmp_path / "hosts").write_text(f"localhost slots=2 {words}\n")
    (tmp_path / name).write_text(text)
    job = start("import big; say(big.HERE == os.getpid())", "--hostfile=hosts", "--preload=big")
    assert job.wait() == 0, job.err
    assert (f"{Path(name).name} at its start, and that names " in job.err) is not is_shared
    assert [job.lines(rank) for rank in range(2)] == [[str(not is_shared)]] * 2


def test_a_python_that_would_run_the_program_at_once_is_not_asked_to_import(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -I "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "hosts").write_text(f"localhost slots=2 python={tmp_path}/python\n")
    job = start("open(f'ran-{os.getpid()}', 'x'); say('ran')", "--hostfile=hosts", "--preload=json")
    assert job.wait() == 0, job.err
    assert "--preload=json: this Python runs no sitecustomize, in which that is done; each" in job.err
    assert len(list(tmp_path.glob("ran-*"))) == 2


@pytest.mark.parametrize("folder", [None, "/proc/no-folder-can-be-made-here"])
def test_where_no_file_can_be_made_nothing_is_imported(folder: str | None) -> None:
    preloader = Preloader(
        Imports([["json"]], None),
        argv=[os.fsencode(sys.executable), b"/bin/false"],
        num_options=1,
        env={},
        folder=folder,
        times=PreloadTimes.within(prepare_timeout_s=60.0, heartbeat_s=30.0),
    )
    assert preloader.why_not == "no temporary file can be made, in which that is done"


def test_an_import_that_does_not_end_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import subprocess, time\n"
        f"open({str(tmp_path / 'started')!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(Unpreloaded, match="nothing was heard of it for 1 s, a part of --prepare_timeout"):
        Preloader(
            Imports([["slow"]], None),
            argv=[os.fsencode(sys.executable), b"/bin/false"],
            num_options=1,
            env={**os.environb, b"PYTHONPATH": bytes(tmp_path)},
            folder=str(tmp_path / "hook"),
            times=PreloadTimes(20.0, 1.0, 20.0, 1.0),
        )
    started = int((tmp_path / "started").read_text())
    poll(
        lambda: not psutil.pid_exists(started) or psutil.Process(started).status() == "zombie",
        "the end of what the import had started",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "ModuleNotFoundError: No module named 'other'"),
        ("raise ValueError('so')", "ValueError: so"),
        ("import os; os.write(2, b'gone\\n'); os._exit(1)", "Python ended: gone"),
    ],
)
def test_what_cannot_be_imported_stops_the_job_before_it_starts(
    text: str | None, said: str, start: Start, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "other.py").write_text(text)
    job = start("say('ran')", "--preload=other")
    assert job.wait() == 3
    assert f"--preload=other: {said}; correct it or leave it out" in job.err
    assert job.out == ""


def test_what_a_module_prints_is_said_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('welcome')")
    job = start("say('ran')", "--preload=loud", "--num_gpus=2")
    assert job.wait() == 0
    assert job.err.count("while loud was imported: welcome") == 1
    assert "welcome" not in job.out


@pytest.mark.parametrize("when", ["importing", "running"])
def test_nothing_is_left_when_the_launcher_is_killed(when: str, start: Start, tmp_path: Path) -> None:
    wait = "" if when == "running" else "open('begun', 'w')\nimport time\nwhile True: time.sleep(1)\n"
    (tmp_path / "endless.py").write_text(wait)
    job = start(
        "open('begun', 'w'); escape(); wait()", "--preload=endless", "--num_gpus=2", "--kill_grace=0.2"
    )
    poll(lambda: (tmp_path / "begun").exists(), when)
    os.killpg(job.process.pid, signal.SIGKILL)
    poll(lambda: not job.survivors(), "nothing to be left")


def test_the_one_that_imported_is_gone_once_the_workers_run(start: Start) -> None:
    job = start("say('ready'); wait()", "--preload=big", "--num_gpus=2")
    poll(lambda: job.out.count("ready") == 2, "both workers")

    def programs() -> list[psutil.Process]:
        children = psutil.Process(job.process.pid).children(recursive=True)
        return [one for one in children if one.is_running() and "--lr" in one.cmdline()]

    poll(lambda: len(programs()) == 2, "the preloader to end")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143


@pytest.mark.parametrize(("value", "names"), [("auto", None), ("none", ()), ("a, b.c", ("a", "b.c"))])
def test_the_option_names_modules(value: str, names: tuple[str, ...] | None) -> None:
    context = cli.dslaunch.make_context("dslaunch", [f"--preload={value}", "train.py"])
    assert read(StartOptions, context.params).preload == names


@pytest.mark.parametrize("value", ["a b", "torch,", "1", "--x"])
def test_what_is_no_name_of_a_module_is_refused(value: str, start: Start) -> None:
    job = start("", f"--preload={value}")
    assert job.wait() == 2
    assert "not names of modules; write them with commas between" in job.err


def test_a_program_that_is_not_python_cannot_be_preloaded(start: Start) -> None:
    job = start("", "--preload=big", "--no_python")
    assert job.wait() == 2
    assert "--preload and --no_python exclude each other" in job.err
