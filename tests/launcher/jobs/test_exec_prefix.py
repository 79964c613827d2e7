"""Jobs whose workers run in containers: namespaces of their own, and a container of podman."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.exhaustive import few
from tests.launcher.boxes import BWRAP, UNSHARE, Podman, PodmanMissing, podman, why_no_bwrap, why_no_unshare
from tests.launcher.local_job import AT_ONCE_S, Job, Start, assert_short, poll

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_unshare()), reason=f"no namespaces here: {why_no_unshare()}"),
]

WHERE = "say('in', os.readlink('/proc/self/ns/pid'))\n"


class Box(NamedTuple):
    """A way into a container."""

    prefix: str
    podman: Podman | None = None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """A container of podman that runs while the tests of this file do."""
    folder = tmp_path_factory.mktemp("podman") / "podman"
    try:
        with podman(
            folder, "-v", f"{tmp_path_factory.getbasetemp()}:{tmp_path_factory.getbasetemp()}"
        ) as one:
            yield one
    except PodmanMissing as missing:
        pytest.skip(f"podman runs no container here: {missing}")


@pytest.fixture(params=few(["unshare", "bwrap", "podman"], lambda kind: kind == "unshare"))
def box(request: pytest.FixtureRequest) -> Box:
    if request.param == "unshare":
        return Box(UNSHARE)
    if request.param == "bwrap":
        if why_no_bwrap():
            pytest.skip(f"bwrap makes no container here: {why_no_bwrap()}")
        return Box(BWRAP)
    one: Podman = request.getfixturevalue("running")
    return Box(one.prefix, one)


def inside(job: Job) -> list[psutil.Process]:
    """Keeper and agent, in this order."""
    found = []
    for pid in job.survivors():
        words: list[str] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            words = process.cmdline()
        if words[1:5] == ["-I", "-S", "-u", "-c"] and "dslaunch is here" in words[5]:
            found.append(process)
    found.sort(key=lambda one: one.create_time())
    return found


def client(job: Job) -> psutil.Process:
    """What the launcher started: the program that the prefix begins with."""
    (child,) = psutil.Process(job.process.pid).children()
    return child


@pytest.mark.parametrize(
    ("worker", "code", "how"),
    [
        ("", 0, ""),
        ("sys.exit(125)", 125, "exited with code 125"),
        ("sys.exit(127)", 127, "exited with code 127"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV (11)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL (9)"),
    ],
)
def test_the_end_of_a_worker_inside_is_told_as_that_of_any(
    worker: str, code: int, how: str, start: Start, box: Box
) -> None:
    job = start(WHERE + worker, "--num_gpus=2", f"--exec_prefix={box.prefix}")
    assert job.wait() == code
    assert how in job.err
    namespaces = {line for rank in (0, 1) for line in job.lines(rank)}
    assert namespaces
    assert f"in {os.readlink('/proc/self/ns/pid')}" not in namespaces
    job.assert_nothing_is_left()
    assert_short(job)


def test_sigterm_reaches_the_workers_inside_which_save(start: Start, box: Box) -> None:
    job = start(
        """
        def save(number, frame):
            say('saved')
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say('ready')
        wait()
        """,
        "--num_gpus=2",
        f"--exec_prefix={box.prefix}",
    )
    job.wait_for("ready", times=2)
    job.signal(signal.SIGTERM)
    assert job.wait(AT_ONCE_S) == 143
    assert job.out.count("saved") == 2
    job.assert_nothing_is_left()


def test_other_signals_reach_them_too(start: Start, box: Box) -> None:
    job = start(
        """
        signal.signal(signal.SIGUSR1, lambda *_: (say('got it'), os._exit(0)))
        say('ready')
        wait()
        """,
        f"--exec_prefix={box.prefix}",
    )
    job.wait_for("ready")
    job.signal(signal.SIGUSR1)
    assert job.wait(AT_ONCE_S) == 0
    assert "got it" in job.out


def test_what_ignores_sigterm_inside_is_killed_after_the_grace(start: Start, box: Box) -> None:
    job = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        escape()
        say('ready')
        if rank == 1: sys.exit(5)
        wait()
        """,
        "--num_gpus=2",
        "--kill_grace=0.5",
        f"--exec_prefix={box.prefix}",
    )
    assert job.wait(AT_ONCE_S) == 5
    job.assert_nothing_is_left()


@pytest.mark.parametrize("victim", ["launcher", "client", "keeper", "agent"])
def test_whichever_process_is_killed_nothing_is_left(victim: str, start: Start, box: Box) -> None:
    job = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        escape()
        say('ready')
        wait()
        """,
        "--num_gpus=2",
        "--kill_grace=0.5",
        "--heartbeat=2",
        f"--exec_prefix={box.prefix}",
    )
    job.wait_for("ready", times=2)
    keeper, agent = inside(job)
    of = {"launcher": job.process.pid, "client": client(job).pid, "keeper": keeper.pid, "agent": agent.pid}
    os.kill(of[victim], signal.SIGKILL)
    if victim == "client" and box.podman is None:  # unshare holds nothing up: its pipes are the agent's
        poll(lambda: not psutil.pid_exists(of["client"]) or client_is_dead(of["client"]), "the client's end")
        job.signal(signal.SIGTERM)
    code = job.wait(AT_ONCE_S)
    job.assert_nothing_is_left()
    if victim in ("keeper", "agent") or (victim == "client" and box.podman is not None):
        assert code == 3
        assert "was the container stopped?" in job.err or "the agent ended" in job.err
    assert "Traceback" not in job.err


def test_a_client_that_hides_the_launchers_end_is_found_out_by_silence(start: Start) -> None:
    holding = '(cat; exec sleep 600) | "$@"'
    job = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nescape()\nsay('ready')\nwait()",
        "--num_gpus=2",
        "--kill_grace=0.5",
        "--heartbeat=2",
        f"--exec_prefix=sh -c '{holding}' sh {UNSHARE}",
    )
    job.wait_for("ready", times=2)
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()

    def names() -> set[str]:
        found = set()
        for pid in job.survivors():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(psutil.Process(pid).name())
        return found

    poll(lambda: names() <= {"sleep", "sh"}, "the end of all but what hides it", AT_ONCE_S)


def client_is_dead(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_variables_and_arguments_arrive_exactly_and_are_on_no_command_line(start: Start, box: Box) -> None:
    arguments = ["an  argument", "b'\"\\ $HOME \n", "\N{GREEK SMALL LETTER PI}"]
    job = start(
        """
        import json
        print(json.dumps([os.environ['NCCL_SECRET'], sys.argv[2:]]), flush=True)
        wait()
        """,
        f"--exec_prefix={box.prefix}",
        "--",
        *arguments,
        env={"NCCL_SECRET": "s3cr3t $x 'y"},
    )
    job.wait_for("s3cr3t")
    (line,) = job.lines(0)
    assert json.loads(line) == ["s3cr3t $x 'y", arguments]
    lines = [
        (Path("/proc") / name / "cmdline").read_bytes()
        for name in filter(str.isdigit, os.listdir("/proc"))
        if (Path("/proc") / name / "cmdline").exists()
    ]
    assert not [one for one in lines if b"s3cr3t" in one]
    words = [one for one in lines if b"an  argument" in one]
    assert len(words) == 2  # of the launcher and of the worker


def test_every_line_arrives_also_the_last_without_its_end(start: Start, box: Box) -> None:
    job = start(
        """
        sys.stdout.write(''.join(f'line {number}\\n' for number in range(100_000)))
        sys.stdout.write('the end')
        sys.stderr.write('{"code": 0, "signal": 9}')
        """,
        f"--exec_prefix={box.prefix}",
        "--quiet",
    )
    assert job.wait(60) == 0
    assert job.lines(0) == [*(f"line {number}" for number in range(100_000)), "the end"]
    assert '{"code": 0, "signal": 9}' in job.err


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("no-such-program -x", "cannot run no-such-program, the first word of exec_prefix: No such file"),
        ("true", "true ended with status 0 before an agent ran behind it and said nothing"),
        ("sh -c 'echo refused >&2; exit 125'", "ended with status 125 before an agent ran behind it, and its "
         "last words are 'refused'"),
        ("unshare -p -f", "/proc there is not that of its processes: mount it"),
        ("unshare -p", "what it starts is in another PID namespace than itself: let it fork, as"),
        ("sh -c '\"$@\" </dev/null' sh", "no input comes through it"),
        (f"{sys.executable} -c 'import pty, sys; pty.spawn(sys.argv[1:])'", "leave out the option -t"),
        (f"{UNSHARE} sh -c 'mount -t tmpfs none /tmp; exec \"$@\"' sh", "inside"),
    ],
)  # fmt: skip
def test_a_prefix_that_leads_nowhere_is_said_before_anything_runs(
    prefix: str, said: str, start: Start
) -> None:
    job = start("say('ran')", f"--exec_prefix={prefix}")
    code = job.wait(AT_ONCE_S)
    if "tmpfs" in prefix and "/tmp" not in str(job.folder):
        pytest.skip("the job's folder is not below /tmp here")
    assert code == 3, job.err
    assert said in job.err
    assert "ran" not in job.out
    job.assert_nothing_is_left()
    assert_short(job)


def test_each_host_has_its_own_way_inside_or_none(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(
        f'localhost slots=2 exec_prefix=\'{UNSHARE} sh -c "hostname of-{{host}}; exec \\"$0\\" \\"$@\\""\'\n'
        f'127.0.0.1 slots=2 exec_prefix="{UNSHARE} sh -c \'hostname second; exec \\"\\$@\\"\' sh"\n'
        f"{os.uname().nodename} slots=2 exec_prefix=''\n"
    )
    job = start("say('host', os.uname().nodename, rank)", "-H", "hosts", f"--exec_prefix={UNSHARE}")
    assert job.wait() == 0, job.err
    own = os.uname().nodename
    names = ["of-localhost"] * 2 + ["second"] * 2 + [own] * 2
    assert sorted(re.findall(r"host (\S+ \d)", job.out)) == sorted(
        f"{name} {rank}" for rank, name in enumerate(names)
    )


def test_what_is_asked_of_workers_works_inside(start: Start) -> None:
    job = start(
        """
        import json as preloaded
        say('cores', *sorted(os.sched_getaffinity(0)), 'json' in sys.modules)
        open(f'ready-{rank}', 'w').close()
        if rank == 1:
            while not os.path.exists('ready-0'): time.sleep(0.001)
            open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(preloaded.dumps({'message': 'noted'}))
            sys.exit(4)
        wait()
        """,
        "--num_gpus=2",
        "--preload=json,decimal",
        "--bind_cores_to_rank",
        "--timings",
        "--report=report.json",
        f"--exec_prefix={UNSHARE}",
    )
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two cores are needed")
    assert job.wait() == 4, job.err
    assert len(set(re.findall(r"cores (\d+) True", job.out))) == 2
    assert json.loads((job.folder / "report.json").read_text())["culprit"]["message"] == "noted"
    job.assert_nothing_is_left()


def test_the_stacks_of_workers_inside_are_shown(start: Start, box: Box) -> None:
    job = start(
        "def here_it_waits(): wait()\nsay('ready')\nhere_it_waits()",
        f"--exec_prefix={box.prefix}",
    )
    job.wait_for("ready")

    def is_shown() -> bool:
        job.signal(signal.SIGQUIT)  # again, as it has no effect before the launcher has heard of the rank
        return "here_it_waits" in job.err

    poll(is_shown, f"the stacks in\n{job.err}")
    job.signal(signal.SIGTERM)
    job.wait(AT_ONCE_S)


def test_another_root_lacks_what_this_one_has(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "root"
    binds = [
        one for one in ("usr", "lib", "lib64", "bin", "etc", sys.base_prefix[1:]) if Path("/", one).exists()
    ]
    mounts = "".join(
        f"mkdir -p {root}/{one}; mount --bind /{one} {root}/{one}; " for one in dict.fromkeys(binds)
    )
    prepare = f"mkdir -p {root}/proc {root}/tmp {root}/dev; {mounts}mount -t proc proc {root}/proc; "
    prepare += f"touch {root}/dev/null; mount --bind /dev/null {root}/dev/null; "
    prepare += f'exec chroot {root} "$@"'
    prefix = f"unshare -m -p -f sh -c {shlex.quote(prepare)} sh"
    job = start("say('ran')", f"--exec_prefix={prefix}")
    assert job.wait() == 3, job.err
    why = f"cannot use the folder {tmp_path}: No such file or directory; start from a folder"
    assert re.search(r"localhost: inside unshare -m .* sh: " + re.escape(why), job.err)
    (tmp_path / "hosts").write_text(f"localhost slots=2 cwd=/etc python={sys.executable}\n")
    job = start("say('ran')", "-H", "hosts", f"--exec_prefix={prefix}")
    assert job.wait() in (2, 3)
    said = "no script train.py in /etc" if Path(sys.executable).is_relative_to("/usr") else "no Python at"
    assert said in job.err
    (tmp_path / "hosts").write_text("localhost slots=2 cwd=/etc\n")
    job = start("say('ran')", "-H", "hosts", f"--exec_prefix={prefix}")
    assert job.wait() == 2
    assert "no script train.py in /etc" in job.err
    job = start("", "-H", "hosts", "--no_python", f"--exec_prefix={prefix}")
    assert job.wait() == 127
    assert "cannot run train.py" in job.err


def test_input_that_no_rank_reads_is_said(start: Start, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("1 2 3\n")
    with (tmp_path / "input").open() as file:
        job = start("say(repr(sys.stdin.read()))", f"--exec_prefix={UNSHARE}", stdin=file.fileno())
    assert job.wait() == 0
    assert "standard input is not read: a prefix passes none on to the ranks" in job.err
    assert job.lines(0) == ["''"]


def test_a_command_and_a_check_look_inside(start_words: Start) -> None:
    prepare = 'mount -t tmpfs -o size=8m none /dev/shm; hostname inside-it; exec "$@"'
    prefix = f"{UNSHARE} sh -c {shlex.quote(prepare)} sh"
    job = start_words("exec", f"--exec_prefix={prefix}", "--", "uname", "-n")
    assert (job.wait(), job.out) == (0, "localhost: inside-it\n")
    job = start_words("check", "--no_torch", f"--exec_prefix={prefix}")
    job.wait()
    assert re.search(r"host name +inside-it", job.out), job.out
    assert "/dev/shm holds 8.0 MiB" in job.out or "/dev/shm holds 8 MiB" in job.out, job.out
    assert_short(job)


def test_the_plan_shows_where_ranks_run(start: Start) -> None:
    job = start("", "--dry_run", "--exec_prefix=podman exec -i 'a box'")
    assert job.wait() == 0
    assert "  inside: podman exec -i 'a box'\n  rank 0, local rank 0: python -u train.py" in job.out


# A container of podman.


@pytest.mark.exhaustive
def test_a_container_that_is_stopped_ends_the_job_and_is_named(start: Start, tmp_path: Path) -> None:
    try:
        with podman(tmp_path / "podman", "-v", f"{tmp_path}:{tmp_path}") as one:
            job = start("say('ready')\nwait()", "--num_gpus=2", f"--exec_prefix={one.prefix}")
            job.wait_for("ready", times=2)
            one.run("kill", one.name)
            assert job.wait(AT_ONCE_S) == 3
            how = f"localhost: {one.prefix} ended with status 137 before the job did"
            assert how in job.err
            assert "was the container stopped?" in job.err
            job.assert_nothing_is_left()
            again = start("say('ready')", f"--exec_prefix={one.prefix}")
            assert again.wait(AT_ONCE_S) == 3
            assert "before an agent ran behind it, and its last words are" in again.err
    except PodmanMissing as missing:
        pytest.skip(f"podman runs no container here: {missing}")


@pytest.mark.exhaustive
def test_a_container_without_memory_is_told_as_such(start: Start, tmp_path: Path) -> None:
    try:
        with podman(tmp_path / "podman", "-v", f"{tmp_path}:{tmp_path}", "--memory=96m") as one:
            job = start(
                "if rank: hoard = [bytearray(1 << 20) for _ in range(500)]\nwait()",
                "--num_gpus=2",
                "--report=report.json",
                f"--exec_prefix={one.prefix}",
            )
            assert job.wait(AT_ONCE_S) == 137, job.err
            assert "evidence: the kernel killed it for memory (cgroup limit 96 MiB)" in job.err
            assert json.loads((job.folder / "report.json").read_text())["culprit"]["is_out_of_memory"]
    except PodmanMissing as missing:
        pytest.skip(f"podman runs no container here: {missing}")


@pytest.mark.exhaustive
def test_a_container_of_the_jobs_own_goes_with_it(start: Start, running: Podman, tmp_path: Path) -> None:
    words = [
        str(running.program),
        *("run", "--rm", "-i", "--name", f"{running.name}-own", "-e", "DSLAUNCH_TEST_JOB"),
        *running.options("-v", f"{tmp_path}:{tmp_path}"),
    ]
    for ending in ("exit", "SIGTERM", "SIGKILL"):
        job = start(
            "say('ready')\nescape()\nif sys.argv[-1] != 'exit': wait()",
            "--num_gpus=2",
            "--kill_grace=1",
            f"--exec_prefix={shlex.join(words)}",
            "--",
            ending,
        )
        job.wait_for("ready", times=2)
        if ending != "exit":
            job.signal(getattr(signal, ending))
        assert job.wait(AT_ONCE_S) == {"exit": 0, "SIGTERM": 143, "SIGKILL": 137}[ending], job.err
        job.assert_nothing_is_left()
        poll(lambda: f"{running.name}-own" not in running.run("ps", "-a"), "the end of the container")


@pytest.mark.exhaustive
def test_what_is_wrong_with_a_prefix_of_podman_is_said(start: Start, running: Podman) -> None:
    exec_in, box = f"{running.program} exec", running.name
    for prefix, said in (
        (f"{exec_in} {box}", "no input comes through it: podman exec and docker exec need the option -i"),
        (f"{exec_in} -it {box}", "its input is a terminal, which changes bytes: leave out the option -t"),
        (f"{exec_in} -i no-such-box", "no such container"),
        (f"{exec_in} -i -w /nowhere {box}", "ended with status 127 before an agent ran behind it"),
    ):
        job = start("say('ran')", f"--exec_prefix={prefix}")
        assert job.wait(AT_ONCE_S) == 3
        assert said in job.err
        assert "ran" not in job.out
        job.assert_nothing_is_left()
        assert_short(job)


@pytest.mark.exhaustive
def test_workers_save_when_their_container_is_stopped(start: Start, running: Podman, tmp_path: Path) -> None:
    own = f"{running.name}-own"
    words = [
        str(running.program),
        *("run", "--rm", "-i", "--name", own, "-e", "DSLAUNCH_TEST_JOB"),
        *running.options("-v", f"{tmp_path}:{tmp_path}"),
    ]
    job = start(
        """
        def save(*_):
            open(f'saved-{rank}', 'w').close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say('ready')
        wait()
        """,
        "--num_gpus=2",
        f"--exec_prefix={shlex.join(words)}",
    )
    job.wait_for("ready", times=2)
    running.run("stop", "-t", "20", own)
    assert job.wait(AT_ONCE_S) == 3
    assert "the agent ended: it got SIGTERM" in job.err
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()
    job.assert_nothing_is_left()


@pytest.mark.exhaustive
def test_a_container_that_stands_still_is_lost_and_clean_once_it_goes_on(
    start: Start, running: Podman
) -> None:
    words = ("--heartbeat=2", "--kill_grace=0.5", f"--exec_prefix={running.prefix}")
    job = start("say('ready')\nwait()", *words)
    job.wait_for("ready")
    running.run("pause", running.name)
    try:
        assert job.wait(AT_ONCE_S) == 3
        assert "nothing heard for" in job.err
    finally:
        running.run("unpause", running.name)
    job.assert_nothing_is_left()


def test_an_interrupt_while_the_container_is_made_ends_that_too(start: Start) -> None:
    job = start("say('ran')", "--exec_prefix=sh -c 'touch began; sleep 600; \"$@\"' sh")
    poll(lambda: (job.folder / "began").exists(), "the prefix")
    job.signal(signal.SIGINT)
    assert job.wait(AT_ONCE_S) == 130
    job.assert_nothing_is_left()


def test_a_container_that_is_never_made_is_given_up(start: Start) -> None:
    job = start("say('ran')", "--prepare_timeout=1", "--exec_prefix=sh -c 'sleep 600; \"$@\"' sh")
    assert job.wait(AT_ONCE_S) == 3
    assert "started no agent within 1 s; does it wait for something?" in job.err
    job.assert_nothing_is_left()


def test_slots_are_counted_inside(start: Start) -> None:
    job = start("say('ran')", "-H", "localhost:auto", f"--exec_prefix={UNSHARE}")
    assert job.wait() == 0
    assert "slots=auto: looking at 1 host" in job.err
    assert "ran" in job.out


def test_a_part_of_a_job_without_ssh_runs_inside(start: Start) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    words = ("--no_ssh", "-H", "localhost:2", "--node_rank=0", "--master_addr=127.0.0.1")
    job = start(WHERE, *words, f"--master_port={port}", f"--exec_prefix={UNSHARE}")
    assert job.wait() == 0, job.err
    assert len(job.lines(0)) == len(job.lines(1)) == 1
    assert f"in {os.readlink('/proc/self/ns/pid')}" not in job.out
