from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.inputs.env_file import EnvEntry, expand
from dslaunch.launcher.node.agent.agent import Agent, AgentState
from dslaunch.launcher.node.observe import gpu_cores
from dslaunch.launcher.node.system import listener
from dslaunch.launcher.node.system.private_folder import PrivateFolder
from dslaunch.launcher.node.workers import preparation
from dslaunch.launcher.node.workers.preparation import Prepared, Unprepared, apply_environment, find_program
from dslaunch.launcher.node.workers.starter import Starter
from dslaunch.launcher.wire.frames import Problem, bytes_of, text_of
from dslaunch.launcher.wire.job import RankJob, as_json, read_job
from tests.launcher.local_job import Job


@pytest.fixture(autouse=True)
def _same_folder_after() -> Iterator[None]:
    """Preparing changes the folder: that is part of what it does."""
    before = os.getcwd()
    yield
    os.chdir(before)


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """A job for one CPU worker that can start."""
    (tmp_path / "train.py").touch()
    return {
        "cwd": str(tmp_path),
        "python": sys.executable,
        "keeps_python": False,
        "script": "train.py",
        "module": None,
        "num_head": 2,
        "adds_local_rank": True,
        "preload": [],
        "has_timings": False,
        "has_milestones": False,
        "venv_script": None,
        "environment": [],
        "devices": ["0"],
        "ranks": [],
        "master_port": None,
        "is_port_fixed": False,
        "kill_grace_s": 30.0,
        "heartbeat_s": 30.0,
        "has_stacks": False,
        "save_pid": None,
        "stdin_rank": None,
        "prepare_timeout_s": 60.0,
        "bind_cores": None,
        "is_verbatim": False,
        "is_server": False,
        "health": None,
        "holds_memory": False,
        "keeps_agent": False,
        "metrics_interval_s": 0.0,
        "folds_metrics": False,
        "is_elastic": False,
        "notice_file": None,
        "notice_command": None,
    }


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def prepare(job: dict[str, Any], *, num_devices: int) -> Prepared:
    return Prepared(read_job(job), num_devices=num_devices)


def refusal(job: dict[str, Any], *, num_devices: int = 0) -> tuple[str, int]:
    with pytest.raises(Unprepared) as refused:
        prepare(job, num_devices=num_devices)
    message = str(refused.value)
    assert "\n" not in message
    return message, refused.value.exit_code


def write_venv(job: dict[str, Any], text: str) -> None:
    """A --venv_script beside the training script."""
    path = Path(job["cwd"]) / "venv.sh"
    path.write_text(text)
    job["venv_script"] = str(path)


# What is inherited.


def test_the_environment_is_what_the_process_was_started_with(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADDED_LATER", "1")
    prepared = prepare(job, num_devices=0)
    assert b"ADDED_LATER" not in prepared.env
    assert prepared.env[b"PATH"]
    assert os.getcwd() == job["cwd"]


def test_the_token_of_the_nodes_reaches_no_worker() -> None:
    code = (
        "from dslaunch.launcher.node.workers.preparation import _inherited_environment as found\n"
        "print(b'DSLAUNCH_TOKEN' in found(), b'OTHER' in found())"
    )
    env = {**os.environ, "DSLAUNCH_TOKEN": "secret", "OTHER": "x"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "True"]


def test_a_folder_that_is_not_here_is_refused(job: dict[str, Any]) -> None:
    job["cwd"] += "/nowhere"
    message, code = refusal(job)
    assert message.startswith(f"cannot use the folder {job['cwd']}: No such file or directory; ")
    assert code == 3


def test_a_python_that_is_not_here_is_refused(job: dict[str, Any]) -> None:
    job["python"] = "/no/such/python"
    assert refusal(job) == (
        "no Python at /no/such/python; every host needs the same path to it, or use --venv_script, "
        "or say python= in the hostfile",
        3,
    )


def test_a_script_that_is_not_here_is_the_person_s_mistake(job: dict[str, Any]) -> None:
    job["script"] = "trian.py"
    assert refusal(job) == (f"no script trian.py in {job['cwd']}", 2)


def test_paths_may_begin_at_the_home_of_this_host(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_inherited_environment", lambda: {b"HOME": os.fsencode(tmp_path)})
    (tmp_path / "my job").mkdir()
    (tmp_path / "my job" / "train.py").touch()
    (tmp_path / "python").symlink_to(sys.executable)
    job |= {"cwd": "~/my job", "python": "~/python"}
    assert prepare(job, num_devices=0).python == f"{tmp_path}/python"
    assert os.getcwd() == f"{tmp_path}/my job"


# Environment entries: `expand` in environment.py says what they mean, `apply_environment` does it on bytes.

NAMES = ["A", "B", "PATH", "LONG_NAME"]
entries = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.lists(st.tuples(st.binary(max_size=6), st.sampled_from(NAMES)), max_size=3),
        st.binary(max_size=6),
    ).map(
        lambda made: EnvEntry(
            name=made[0],
            value=(*(part for text, name in made[1] for part in (text_of(text), name)), text_of(made[2])),
            source="a test",
        )
    ),
    max_size=6,
)


@given(
    entries=entries,
    base=st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=6).map(text_of), max_size=3),
)
def test_entries_are_applied_as_environment_expand_defines(
    entries: list[EnvEntry], base: dict[str, str]
) -> None:
    env = {bytes_of(name): bytes_of(value) for name, value in base.items()}
    apply_environment(env, [[entry.name, *entry.value] for entry in entries])
    assert env == {bytes_of(name): bytes_of(value) for name, value in expand(entries, base).items()}


# Programs.


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("{0}/a:{0}/b", "tool", "{0}/b/tool"),
        ("{0}/b:{0}/a", "tool", "{0}/b/tool"),
        ("{0}/a", "tool", None),  # there, but not executable
        ("{0}/b", "folder", None),
        ("{0}/b", "{0}/b/tool", "{0}/b/tool"),
        ("", "./b/tool", "./b/tool"),
        ("{0}/none::{0}/b", "tool", "{0}/b/tool"),
    ],
)
def test_programs_are_found_as_a_shell_finds_them(
    path: str, name: str, found: str | None, tmp_path: Path
) -> None:
    for folder, mode in (("a", 0o644), ("b", 0o755)):
        (tmp_path / folder / "folder").mkdir(parents=True)
        (tmp_path / folder / "tool").touch(mode)
    os.chdir(tmp_path)
    result = find_program(name.format(tmp_path).encode(), {b"PATH": path.format(tmp_path).encode()})
    assert result == (found and found.format(tmp_path).encode())


# Devices.


@pytest.mark.parametrize(
    ("num_devices", "devices", "visible"),
    [
        (4, ["0", "1"], b"0,1"),
        (4, ["3", "1"], b"3,1"),
        (1, ["GPU-8a31", "MIG-7"], b"GPU-8a31,MIG-7"),
    ],
)
def test_the_devices_of_the_host_become_visible(
    num_devices: int, devices: list[str], visible: bytes, job: dict[str, Any]
) -> None:
    job["devices"] = devices
    prepared = prepare(job, num_devices=num_devices)
    assert prepared.env[b"CUDA_VISIBLE_DEVICES"] == visible
    assert prepared.notes == []


@pytest.mark.parametrize(
    ("devices", "second"),
    [(["MIG-a", "MIG-b"], {b"CUDA_VISIBLE_DEVICES": b"MIG-b"}), (["0", "1"], {}), (["GPU-8", "GPU-9"], {})],
)
def test_each_rank_is_shown_its_own_mig_device(
    devices: list[str], second: dict[bytes, bytes], job: dict[str, Any]
) -> None:
    job["devices"] = devices
    assert prepare(job, num_devices=2).own_devices({b"LOCAL_RANK": b"1"}) == second


@pytest.mark.parametrize(
    ("of_host", "of_file", "num_devices", "expected"),
    [(None, None, 2, b"32"), (None, "1", 2, b"1"), ("1", None, 2, b"1"), (None, None, 0, None)],
)
def test_streams_of_a_gpu_have_queues_of_their_own_unless_one_queue_is_asked_for(
    of_host: str | None,
    of_file: str | None,
    num_devices: int,
    expected: bytes | None,
    job: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    inherited = {} if of_host is None else {name.encode(): of_host.encode()}
    monkeypatch.setattr(preparation, "_inherited_environment", lambda: dict(inherited))
    job["devices"] = ["0", "1"]
    job["environment"] = [] if of_file is None else [[name, of_file]]
    assert prepare(job, num_devices=num_devices).env.get(name.encode()) == expected


def test_a_worker_is_started_with_its_own_mig_device(job: dict[str, Any]) -> None:
    job |= {"devices": ["MIG-a", "MIG-b"]}
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    rank = RankJob(rank=1, env=[["LOCAL_RANK", "1"]], arguments=["-c", code])
    node_job = read_job({**job, "ranks": [as_json(rank)]})
    folder = PrivateFolder()
    try:
        starter = Starter(node_job, prepare(job, num_devices=2), folder, num_devices=2)
        worker = starter.start(rank)
        assert os.waitpid(worker.pid, 0)[1] == 0
        assert worker.streams[0].read()[0] == b"MIG-b\n"
    finally:
        folder.remove()


@pytest.mark.parametrize(("given", "is_told"), [("1", True), ("0,1", False)])
def test_visible_devices_of_a_file_are_not_used_and_a_note_says_so(
    given: str, is_told: bool, job: dict[str, Any]
) -> None:
    job["devices"] = ["0", "1"]
    job["environment"] = [["CUDA_VISIBLE_DEVICES", given]]
    prepared = prepare(job, num_devices=4)
    assert prepared.env[b"CUDA_VISIBLE_DEVICES"] == b"0,1"
    note = (
        "CUDA_VISIBLE_DEVICES=1 of a file is not used: ranks get 0,1 here; choose with --include, or with "
        "devices= in the hostfile"
    )
    assert prepared.notes == ([note] if is_told else [])


def test_a_folder_that_python_can_run_is_a_script(job: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    job["script"] = "folder"
    assert refusal(job)[0].startswith("folder is a folder without a __main__.py;")
    (tmp_path / "folder" / "__main__.py").touch()
    prepare(job, num_devices=0)


def test_a_script_that_may_not_be_read_is_told_before_the_start(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **how: mode != os.R_OK)  # root may read everything
    assert refusal(job) == (
        f"the script train.py may not be read by user {os.geteuid()} here; let it be read: chmod +r",
        2,
    )


def test_a_slot_without_a_gpu_is_refused(job: dict[str, Any]) -> None:
    job["devices"] = ["0", "4", "5"]
    assert refusal(job, num_devices=4) == (
        (
            "slot 4, 5 is asked for, but there are 4 GPUs here (0-3); correct slots= in the "
            "hostfile, or use --include"
        ),
        3,
    )


def test_a_gpu_s_name_on_a_host_without_gpus_is_refused(job: dict[str, Any]) -> None:
    job["devices"] = ["0", "GPU-8a31", "MIG-7"]
    assert refusal(job) == (
        "device GPU-8a31, MIG-7 is asked for, but there is no GPU here; correct devices= in the hostfile",
        3,
    )


@pytest.mark.parametrize(
    ("devices", "given", "threads", "note"),
    [
        (["0"], None, None, "no GPU here: 1 CPU worker"),
        (["0", "1"], None, b"3", "no GPU here: 2 CPU workers, OMP_NUM_THREADS=3 for each"),
        ([str(number) for number in range(16)], None, b"1",
         "no GPU here: 16 CPU workers, OMP_NUM_THREADS=1 for each"),
        (["0", "1"], "7", b"7", "no GPU here: 2 CPU workers"),
    ],
)  # fmt: skip
def test_cpu_workers_share_the_cores(
    devices: list[str],
    given: str | None,
    threads: bytes | None,
    note: str,
    job: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.setattr(preparation, "_inherited_environment", dict)
    monkeypatch.setattr(preparation, "count_hidden", lambda: 0)
    job["devices"] = devices
    job["environment"] = [["OMP_NUM_THREADS", given]] if given else []
    prepared = prepare(job, num_devices=0)
    assert prepared.env.get(b"OMP_NUM_THREADS") == threads
    assert prepared.notes == [note]
    assert b"CUDA_VISIBLE_DEVICES" not in prepared.env


def test_gpus_that_a_container_was_not_given_are_noted(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "count_hidden", lambda: 8)
    (note,) = prepare(job | {"devices": ["0"]}, num_devices=0).notes
    assert note.startswith("no GPU here: 1 CPU worker; the driver has 8, so a container has to be given them")


def test_the_python_that_runs_the_agent_runs_the_ranks_if_the_job_says_so(job: dict[str, Any]) -> None:
    prepared = prepare(job | {"python": "", "devices": []}, num_devices=0)
    assert prepared.python == sys.executable
    assert prepared.notes == [f"ranks run with {sys.executable}, Python {sys.version.split()[0]}"]


# The port of rank 0.


def test_a_free_port_is_kept(job: dict[str, Any]) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    job["master_port"] = port
    prepared = prepare(job, num_devices=0)
    assert prepared.master_port == port
    assert len(prepared.notes) == 1


def test_a_busy_port_moves_and_says_so(job: dict[str, Any], busy_port: int) -> None:
    job["master_port"] = busy_port
    prepared = prepare(job, num_devices=0)
    assert prepared.master_port not in (0, busy_port)
    assert prepared.notes[1:] == [f"port {busy_port} is in use here, so MASTER_PORT={prepared.master_port}"]


def test_a_busy_port_that_was_asked_for_is_refused(job: dict[str, Any], busy_port: int) -> None:
    job.update(master_port=busy_port, is_port_fixed=True)
    assert refusal(job) == (
        f"--master_port={busy_port} is in use here; choose another, or leave the option out if you gave it",
        2,
    )


def test_a_port_that_another_job_was_promised_is_busy_until_that_job_is_gone(job: dict[str, Any]) -> None:
    """Its rank 0 does not listen yet: it may import torch for seconds."""
    first = prepare(job | {"master_port": 0}, num_devices=0)
    wanted = job | {"master_port": first.master_port}
    second = prepare(wanted, num_devices=0)
    assert second.master_port != first.master_port
    assert "is in use here" in second.notes[1]
    port = first.master_port
    del first
    assert prepare(wanted, num_devices=0).master_port == port


def test_nobody_listens_on_a_port_that_another_job_was_promised_not_even_to_look(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank 0 may be about to listen there, and would find the port taken."""
    first = prepare(job | {"master_port": 0}, num_devices=0)
    looked_at = []
    listen = listener.listen_on_all

    def look(port: int) -> socket.socket:
        looked_at.append(port)
        return listen(port)

    monkeypatch.setattr(listener, "listen_on_all", look)
    second = prepare(job | {"master_port": first.master_port}, num_devices=0)
    assert looked_at == [0]
    assert second.master_port not in (0, first.master_port)


def test_a_port_that_only_root_may_use_is_not_called_busy(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(port: int) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(listener, "listen_on_all", forbid)
    job.update(master_port=80, is_port_fixed=True)
    assert refusal(job) == ("--master_port=80 cannot be used here: Permission denied; choose another", 2)


def test_a_node_that_is_not_the_first_looks_at_no_port(job: dict[str, Any]) -> None:
    assert prepare(job, num_devices=0).master_port == 0


# --venv_script.


def test_what_a_venv_script_exports_is_inherited(job: dict[str, Any]) -> None:
    write_venv(job, "export ADDED='two words'\nexport HOME=/else\nunset LANG\nNOT_EXPORTED=1\n")
    env = prepare(job, num_devices=0).env
    assert env[b"ADDED"] == b"two words"
    assert env[b"HOME"] == b"/else"
    assert not env.keys() & {b"LANG", b"NOT_EXPORTED", b"DSLAUNCH_VENV_SCRIPT"}


@pytest.mark.parametrize("keeps_python", [False, True])
def test_the_python_of_a_venv_is_used_unless_the_hostfile_says_another(
    keeps_python: bool, job: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    write_venv(job, f"export PATH='{tmp_path}/bin':$PATH\n")
    job["keeps_python"] = keeps_python
    expected = sys.executable if keeps_python else f"{tmp_path}/bin/python"
    assert prepare(job, num_devices=0).python == expected


def test_environment_files_come_after_the_venv_script(job: dict[str, Any]) -> None:
    write_venv(job, "export A=venv B=venv\n")
    job["environment"] = [["A", "file:", "B", ""]]
    env = prepare(job, num_devices=0).env
    assert (env[b"A"], env[b"B"]) == (b"file:venv", b"venv")


def test_a_venv_script_that_prints_changes_nothing(job: dict[str, Any]) -> None:
    write_venv(job, "echo A=noise; printf 'B=\\0noise\\0'; echo C=noise >&2; export D=1\n")
    env = prepare(job, num_devices=0).env
    assert env[b"D"] == b"1"
    assert not env.keys() & {b"A", b"B", b"C"}


def test_bytes_of_any_kind_survive_a_venv_script(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = bytes(range(1, 256))
    monkeypatch.setattr(
        preparation, "_inherited_environment", lambda: {b"V": value, b"PATH": b"/bin:/usr/bin"}
    )
    write_venv(job, "export W=1\n")
    env = prepare(job, num_devices=0).env
    assert (env[b"V"], env[b"W"]) == (value, b"1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo first >&2; echo why >&2; exit 3", "ended with 3: why"),
        ("exit 3", "ended with 3: it wrote nothing to stderr"),
        ("kill -9 $$", "ended with -9: it wrote nothing to stderr"),
        ("set -e; false; true", "ended with 1: it wrote nothing to stderr"),
        ("export A=1; exit 0", "called exit, so what it set is lost; let it end with its last line"),
    ],
)
def test_a_venv_script_that_fails_is_quoted(text: str, message: str, job: dict[str, Any]) -> None:
    write_venv(job, text)
    assert refusal(job) == (f"--venv_script={job['venv_script']} {message}", 3)


@pytest.mark.parametrize(
    ("text", "why"), [("export A=1\nsyntax (\n", "syntax"), ("cd /no/such\n", "/no/such")]
)
def test_a_venv_script_that_complains_at_its_end_is_quoted(text: str, why: str, job: dict[str, Any]) -> None:
    write_venv(job, text)
    message, code = refusal(job)
    assert f"--venv_script={job['venv_script']} ended with " in message
    assert why in message.lower()
    assert code == 3


def test_a_last_line_that_fails_without_a_word_is_no_fault_of_a_venv_script(job: dict[str, Any]) -> None:
    write_venv(job, "trap 'echo bye' EXIT\necho hello\nexport A=1\n[ -d /no/such ] && export B=1\n")
    env = prepare(job, num_devices=0).env
    assert env[b"A"] == b"1"
    assert not [name for name in env if b"bye" in name or b"hello" in name]


def test_a_venv_script_that_is_a_folder(job: dict[str, Any]) -> None:
    job["venv_script"] = "/"
    message, code = refusal(job)
    assert "is a directory" in message.lower()
    assert code == 3


@pytest.mark.parametrize("device", ["", "/dev/zero"])
def test_a_venv_script_without_an_end(device: str, job: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "venv.sh"
    path.symlink_to(device) if device else os.mkfifo(path)
    job["venv_script"] = str(path)
    why = "is a pipe or a device, whose end may never come; name a shell script"
    assert refusal(job) == (f"--venv_script={path} {why}", 3)


def test_a_venv_script_that_is_not_here(job: dict[str, Any]) -> None:
    job["venv_script"] = "/no/such.sh"
    assert refusal(job) == ("--venv_script=/no/such.sh ended with 1: no such file", 3)


def test_a_venv_script_that_does_not_end(job: dict[str, Any]) -> None:
    job["prepare_timeout_s"] = 0.4
    write_venv(job, "exec sleep 1000\n")
    message, code = refusal(job)
    assert message.endswith("did not end within 0.1 s, a quarter of --prepare_timeout")
    assert code == 3


def test_a_venv_script_is_read_with_its_name_in_this_folder(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`.` looks for a name without a slash in PATH first; the file in this folder is meant."""
    other = tmp_path / "bin"
    other.mkdir()
    (other / "activate").write_text("export FROM=path\n")
    (tmp_path / "activate").write_text("export FROM=here\n")
    path = f"{other}:/usr/bin:/bin".encode()
    monkeypatch.setattr(preparation, "_inherited_environment", lambda: {b"PATH": path})
    job["venv_script"] = "activate"
    assert prepare(job, num_devices=0).env[b"FROM"] == b"here"


def test_a_venv_script_may_be_in_the_home_of_the_node(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "env.sh").write_text("export FROM=home\n")
    env = {b"PATH": b"/usr/bin:/bin", b"HOME": os.fsencode(tmp_path / "home")}
    monkeypatch.setattr(preparation, "_inherited_environment", lambda: dict(env))
    job["venv_script"] = "~/env.sh"
    assert prepare(job, num_devices=0).env[b"FROM"] == b"home"


def test_a_venv_script_may_leave_a_process_that_keeps_its_stderr(job: dict[str, Any]) -> None:
    job["prepare_timeout_s"] = 20.0
    write_venv(job, "sleep 60 & export LEFT=$!\n")
    env = prepare(job, num_devices=0).env
    os.kill(int(env[b"LEFT"]), 9)


def test_the_python_of_the_venv_is_used(job: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch(0o755)
    write_venv(job, f"PATH={tmp_path}/bin:$PATH\n")
    assert prepare(job, num_devices=0).python == f"{tmp_path}/bin/python"


def test_a_venv_script_that_does_not_change_python_keeps_ours(job: dict[str, Any], tmp_path: Path) -> None:
    write_venv(job, f"PATH=$PATH:{tmp_path}\n")
    assert prepare(job, num_devices=0).python == sys.executable
    job["python"] = None  # --no_python
    assert prepare(job, num_devices=0).python is None


def test_a_python_that_is_missing_here_may_come_from_the_venv(job: dict[str, Any], tmp_path: Path) -> None:
    job["python"] = "/no/such/python"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch(0o755)
    write_venv(job, f"PATH={tmp_path}/bin:$PATH\n")
    assert prepare(job, num_devices=0).python == f"{tmp_path}/bin/python"


def test_where_no_port_is_free_that_is_said_and_nothing_waits_for_one(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoPort:
        def __init__(self, port: int) -> None:
            raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(preparation, "PortClaim", NoPort)
    message, exit_code = refusal({**job, "master_port": 29500})
    assert message.startswith(
        "no port is free here for MASTER_PORT (Address already in use, tried 100 times; "
    )
    assert "net.ipv4.ip_local_port_range, " in message
    assert exit_code == 3


def test_a_host_that_does_not_get_ready_is_given_up_with_the_step_it_is_at() -> None:
    told: list[Any] = []
    agent = Agent.__new__(Agent)  # one whose thread is in the kernel
    agent._state, agent._prepare_by = AgentState.WAITING, 10.0
    agent._job = SimpleNamespace(prepare_timeout_s=1.0)  # type: ignore[assignment]
    agent._uplink = SimpleNamespace(send=told.append)  # type: ignore[assignment]
    agent._begin_step("entering the folder /nfs/job")
    for now in (9.0, 11.0, 12.0):
        agent._check_preparation(now)
    assert told == [
        Problem(
            "not prepared within --prepare_timeout=1 s: still entering the folder /nfs/job; look at its file "
            "systems there, or give it more time",
            3,
        )
    ]


@pytest.mark.slow
def test_a_script_that_hangs_is_blamed_before_the_host_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "venv.sh").write_text("read line < never\n")  # as a script on a file system that hangs
    os.mkfifo(tmp_path / "never")
    job = Job(tmp_path, ["--prepare_timeout=1", "--venv_script=venv.sh", "train.py"])
    try:
        assert job.wait() == 3
    finally:
        job.end()
    assert (
        "localhost: --venv_script=venv.sh did not end within 0.25 s, a quarter of --prepare_timeout"
        in job.err
    )


TWO_CORES = sorted(os.sched_getaffinity(0))[:2]


@pytest.mark.skipif(len(TWO_CORES) < 2, reason="one core")
@pytest.mark.parametrize(
    ("near", "cores", "note"),
    [
        ({"0": {TWO_CORES[-1]}, "1": {TWO_CORES[0]}}, TWO_CORES[::-1], "near its GPU"),
        ({"0": {TWO_CORES[0]}, "1": {TWO_CORES[0]}}, TWO_CORES,
         "wherever its GPU is (too few cores are near the GPUs to give each rank its own)"),
        ({}, TWO_CORES, "wherever its GPU is (nothing is known)"),
    ],
)  # fmt: skip
def test_ranks_with_gpus_get_cores_near_them_or_the_reason_why_not(
    near: dict[str, set[int]],
    cores: list[int],
    note: str,
    job: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cores_near(devices: list[str], *, is_by_bus: bool) -> list[set[int]]:
        assert not is_by_bus
        if not near:
            raise LookupError("nothing is known")
        return [near[device] for device in devices]

    monkeypatch.setattr(gpu_cores, "cores_near", cores_near)
    prepared = prepare({**job, "devices": ["0", "1"], "bind_cores": TWO_CORES}, num_devices=2)
    assert prepared.cores == [[core] for core in cores]
    start = f"each rank is bound to 1 core{' ' if note.startswith('near') else ', '}{note}: "
    assert prepared.notes == [start + ", ".join(map(str, cores))]
