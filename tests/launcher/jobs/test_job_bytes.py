"""Arguments, variables and output arrive byte for byte, in every locale,
and nothing of them is on a command line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.launcher.local_job import FORGOTTEN, MARK, Job, Start, poll

pytestmark = pytest.mark.slow

any_bytes = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b""))


def exact(folder: Path, words: list[bytes], values: list[bytes], env: Mapping[str, str]) -> None:
    """These arguments and these values of an environment file arrive as they are."""
    (folder / "train.py").write_text(
        "import os\n"
        "os.makedirs('got', exist_ok=True)\n"
        "for name in ('cmdline', 'environ'):\n"
        "    with open('/proc/self/' + name, 'rb') as file, open('got/' + name, 'wb') as copy:\n"
        "        copy.write(file.read())\n"
    )
    lines = [b"V%d=%s\n" % (place, quoted(value)) for place, value in enumerate(values)]
    (folder / ".deepspeed_env").write_bytes(b"".join(lines))
    job = Job(folder, ["--no_local_rank", "train.py", *words], env=env)
    try:
        assert job.wait() == 0, job.err
    finally:
        job.end()
    got = (folder / "got" / "cmdline").read_bytes().split(b"\0")
    assert got[got.index(b"train.py") + 1 : -1] == words
    environ = dict(
        pair.split(b"=", 1) for pair in (folder / "got" / "environ").read_bytes().split(b"\0") if pair
    )
    assert [environ[b"V%d" % place] for place in range(len(values))] == values
    for name, value in env.items():
        if not name.startswith(("PYTHON", "LC_", "LOCPATH")):
            assert environ[os.fsencode(name)] == os.fsencode(value)


def quoted(value: bytes) -> bytes:
    return b"'" + value.replace(b"'", b"'\"'\"'") + b"'"


@settings(max_examples=3)
@given(
    words=st.lists(any_bytes, max_size=30).filter(lambda words: words[:1] != [b"--"]),
    values=st.lists(any_bytes, max_size=30),
    shell_value=any_bytes,
)
def test_arguments_and_values_arrive_byte_for_byte(
    words: list[bytes], values: list[bytes], shell_value: bytes, tmp_path: Path
) -> None:
    exact(
        tmp_path, words, values, {"NCCL_ODD": os.fsdecode(shell_value), "OTHER_ODD": os.fsdecode(shell_value)}
    )


ALL_BYTES = bytes(range(1, 256))
UTF8 = "caf\u00e9 \u2192 \U0001f600".encode()


def locale_of(name: str, folder: Path) -> dict[str, str]:
    """The variables of a locale; one that is not UTF-8 is made in `folder`."""
    if name == "C":
        return {"LC_ALL": "C"}
    if name == "C without UTF-8":
        return {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if shutil.which("localedef") is None:
        pytest.skip("no localedef here")
    path = folder / "locale" / "en_US.ISO-8859-1"
    path.parent.mkdir()
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", path], capture_output=True, check=False
    )
    if not path.exists():
        pytest.skip(f"localedef: {made.stderr!r}")
    return {"LOCPATH": str(path.parent), "LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("name", ["C without UTF-8", "Latin-1"])
def test_bytes_arrive_in_every_locale(name: str, tmp_path: Path) -> None:
    env = {**locale_of(name, tmp_path), "NCCL_ODD": os.fsdecode(ALL_BYTES), "NCCL_UTF8": os.fsdecode(UTF8)}
    exact(tmp_path, [ALL_BYTES, UTF8], [ALL_BYTES, UTF8], env)


@pytest.mark.parametrize("name", ["C", "Latin-1"])
def test_output_passes_in_every_locale(name: str, start: Start, tmp_path: Path) -> None:
    job = start(
        f"os.write(1, {UTF8!r} + b' \\xff\\n'); sys.stdout = None; sys.exit(3)", env=locale_of(name, tmp_path)
    )
    assert job.wait() == 3
    assert (tmp_path / "stdout").read_bytes() == b"localhost:0 | " + UTF8 + b" \xff\n"
    assert b"    " + UTF8 + b" \xff\n" in (tmp_path / "stderr").read_bytes()


@pytest.mark.parametrize("name", ["C without UTF-8", "Latin-1"])
def test_a_dry_run_prints_in_every_locale(name: str, start: Start, tmp_path: Path) -> None:
    job = start("", "--dry_run", "--", UTF8.decode(), env=locale_of(name, tmp_path))
    assert job.wait() == 0, job.err


def test_the_environment_is_that_of_the_launcher_and_nothing_more(start: Start, tmp_path: Path) -> None:
    """Python sets LC_CTYPE in its own environment in the C locale; the workers must not see that."""
    job = start("open('environ', 'wb').write(open('/proc/self/environ', 'rb').read())", "--num_gpus=1")
    assert job.wait() == 0
    names = {
        pair.split(b"=")[0].decode() for pair in (tmp_path / "environ").read_bytes().split(b"\0") if pair
    }
    mine = {name for name in os.environ if not name.startswith(FORGOTTEN)} | {"PYTHONDONTWRITEBYTECODE", MARK}
    added = {
        "CROSS_RANK", "CROSS_SIZE", "DSLAUNCH_DROP_IN", "DSLAUNCH_PLACE_FILE", "DSLAUNCH_STACKS",
        "DSLAUNCH_METRICS_INTERVAL", "DSLAUNCH_METRICS_PIPE", "GROUP_RANK",
        "GROUP_WORLD_SIZE", "LOCAL_RANK",
        "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "PYTHONPATH", "RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "WORLD_SIZE",
    }  # fmt: skip
    assert names - {"PWD", "OLDPWD", "SHLVL", "_", "CUDA_VISIBLE_DEVICES"} == (mine | added) - {
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    }


def test_no_value_is_on_a_command_line(start: Start, tmp_path: Path) -> None:
    secret = "s3cret-" + uuid.uuid4().hex
    (tmp_path / ".deepspeed_env").write_text(f"MY_TOKEN={secret}\n")
    (tmp_path / "venv.sh").write_text("touch sourcing; while [ ! -e go ]; do sleep 0.01; done\n")
    job = start(
        "say(len(os.environ['MY_TOKEN'])); wait()", "--venv_script=venv.sh", env={"NCCL_SECRET": secret}
    )
    seen: set[str] = set()

    def look() -> None:
        for pid in job.survivors():
            with contextlib.suppress(OSError):
                seen.add(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))

    def is_sourcing() -> bool:
        look()
        return (tmp_path / "sourcing").exists()

    poll(is_sourcing, "the venv script")
    (tmp_path / "go").touch()
    job.wait_for(str(len(secret)))
    look()
    assert any("train.py" in line for line in seen)
    assert not [line for line in seen if secret in line]
