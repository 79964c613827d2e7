"""`dslaunch drop-in` in environments that are made for one test: real processes of their Python,
and of their commands.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch import drop_in
from dslaunch.drop_in import installation, seen
from dslaunch.drop_in.installation import install, status, uninstall
from dslaunch.drop_in.installed_files import COMMANDS, CONVERTER, PTH, RECORD, InstallPlace, files_for
from dslaunch.launcher.errors import LaunchError

MADE = {PTH, RECORD, *COMMANDS, CONVERTER}
ASK = """
import json, sys
from importlib.metadata import version
from importlib.util import find_spec
import deepspeed
print(json.dumps([deepspeed.__version__, version("deepspeed"), find_spec("deepspeed").origin]))
"""


@pytest.fixture
def place(tmp_path: Path) -> InstallPlace:
    """An environment where dslaunch is installed: its own folders, and behind them those of the tests."""
    folder = tmp_path / "it's an environment"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return InstallPlace(python=folder / "bin/python", packages=packages, scripts=folder / "bin")


def run(place: InstallPlace, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the environment, or its Python."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSLAUNCH_")}
    env["PATH"] = f"{place.scripts}{os.pathsep}{env['PATH']}"
    return subprocess.run(
        words,
        cwd=place.scripts.parent,
        env=env | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def dslaunch(place: InstallPlace, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run(place, "python", "-m", "dslaunch", *words, **more)


def files_of(place: InstallPlace) -> dict[str, bytes]:
    """All files of the environment; what Python compiles for itself is none."""
    folder = place.scripts.parent
    return {
        str(path.relative_to(folder)): os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file()) and "__pycache__" not in path.parts
    }


def make_deepspeed(folder: Path) -> None:
    """What looks like an installed DeepSpeed."""
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text("__version__ = '0.1'\n")
    info = folder / "deepspeed-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1\n")


@pytest.mark.slow
def test_an_environment_has_package_and_commands_until_they_are_uninstalled(place: InstallPlace) -> None:
    before = files_of(place)
    assert run(place, "python", "-c", ASK).returncode == 1
    for _ in range(2):  # twice is as good as once
        done = dslaunch(place, "drop-in", "install")
        assert (done.returncode, done.stderr) == (0, "")
    assert "installed already" in done.stdout
    assert {Path(name).name for name in files_of(place).keys() - before.keys()} == MADE

    version, metadata, origin = json.loads(run(place, "python", "-c", ASK).stdout)
    assert version == metadata == drop_in.VERSION
    assert origin.startswith(drop_in.FOLDER)
    for words in (["deepspeed", "--help"], ["ds", "--help"], ["ds_ssh", "-h"], ["ds_report", "--no_torch"]):
        done = run(place, *words)
        assert (done.returncode, done.stderr) == (0, ""), words
    assert f"({place.python})" in done.stdout  # the environment's, not that of which dslaunch is
    shown = dslaunch(place, "drop-in", "status").stdout
    assert f"{place.python}: installed by dslaunch" in shown
    assert f"import deepspeed: dslaunch {drop_in.VERSION} ({origin})" in shown
    assert f"command deepspeed: {place.scripts}/deepspeed\n" in shown

    assert dslaunch(place, "drop-in", "uninstall").returncode == 0
    assert files_of(place) == before
    assert "nothing to remove" in dslaunch(place, "drop-in", "uninstall").stdout
    assert "not installed" in dslaunch(place, "drop-in", "status").stdout


@pytest.mark.slow
def test_a_job_says_where_deepspeed_comes_from_all_the_same(place: InstallPlace) -> None:
    list(install(place, is_dry_run=False))
    make_deepspeed(place.packages)  # which is installed later
    expected = {"": "0.1", "auto": "0.1", "always": drop_in.VERSION, "never": "0.1"}
    for mode, version in expected.items():
        more = {drop_in.VARIABLE: mode} if mode else {}
        assert json.loads(run(place, "python", "-c", ASK, **more).stdout)[:2] == [version] * 2, mode
    assert any(line.startswith("import deepspeed: DeepSpeed 0.1 (") for line in status(place))
    shutil.rmtree(place.packages / "deepspeed")
    done = run(place, "python", "-c", ASK, DSLAUNCH_DROP_IN="never")
    assert "No module named 'deepspeed'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("where", ["packages", "PYTHONPATH"])
def test_nothing_is_installed_where_deepspeed_is(
    where: str, place: InstallPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place.packages if where == "packages" else tmp_path / "elsewhere"
    make_deepspeed(folder)
    # Ours hides the other one from programs, and must not hide it here.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([drop_in.FOLDER, str(folder)]))
    before = files_of(place)
    done = dslaunch(place, "drop-in", "install", PYTHONPATH=os.environ["PYTHONPATH"])
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"dslaunch: {place.python} has DeepSpeed 0.1 ({folder}/deepspeed/__init__.py), which stays as it is: "
        "uninstall it first"
    )
    assert done.stderr.count("\n") == 1
    assert files_of(place) == before


@pytest.mark.slow
def test_a_file_that_is_there_already_is_in_the_way(place: InstallPlace) -> None:
    (place.scripts / "ds").symlink_to("/nowhere")
    os.mkfifo(place.scripts / "ds_report")
    before = files_of(place)
    with pytest.raises(
        LaunchError, match="there already, and not as dslaunch has made it; move it away"
    ) as refused:
        list(install(place, is_dry_run=False))
    assert str(refused.value).startswith(f"{place.scripts}/ds, {place.scripts}/ds_report: ")
    assert files_of(place) == before


def test_a_folder_that_cannot_be_written_is_refused(
    place: InstallPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != place.scripts)  # root may write everywhere
    with pytest.raises(LaunchError, match="you may not write there; use a virtual environment of your own"):
        list(install(place, is_dry_run=False))


@pytest.mark.slow
def test_what_was_changed_is_left_and_named(place: InstallPlace) -> None:
    before = files_of(place)
    list(install(place, is_dry_run=False))
    mine = place.scripts / "ds"
    mine.write_text("echo mine\n")
    (place.scripts / "ds_ssh").unlink()
    assert f"  {mine}: changed since, or made by another program" in status(place)
    with pytest.raises(LaunchError, match=r"/ds: there already"):
        list(install(place, is_dry_run=False))
    full = files_of(place)
    shown = list(uninstall(place, is_dry_run=True))
    assert files_of(place) == full
    lines = list(uninstall(place, is_dry_run=False))
    assert [line.replace("would leave", "left").replace("would remove", "removed") for line in shown] == lines
    assert f"left {mine}, which was changed since, or made by another program" in lines
    assert files_of(place) == before | {"bin/ds": b"echo mine\n"}


@pytest.mark.slow
def test_what_another_place_of_dslaunch_has_installed_is_made_anew(
    place: InstallPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        old = files_for(place, folder="/old/path", commands="/old/bin")
        other.setattr(installation, "files_for", lambda place: old)
        other.setattr(installation, "FOLDER", "/old/path")
        other.setattr(installation, "look", lambda python, heeds_variable: FOUND)
        list(install(place, is_dry_run=False))
    assert f"  dslaunch is in another place now, {drop_in.FOLDER}: install again" in status(place)
    list(install(place, is_dry_run=False))
    assert {file.path: file.data for file in files_for(place)} == {
        file.path: file.path.read_bytes() for file in files_for(place)
    }


FOUND = installation.Seen(
    origin="/old/path/deepspeed/__init__.py", version=None, other=None, other_version=None
)
Break = Callable[[pytest.MonkeyPatch, InstallPlace], None]


def full_disk(monkeypatch: pytest.MonkeyPatch, place: InstallPlace) -> None:
    write = installation._write

    def fail(path: Path, data: bytes, **more: object) -> None:
        if path.name == "ds_ssh" and "undo" in more:
            raise OSError(28, "No space left on device", str(path))
        write(path, data, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(installation, "_write", fail)


def unread_folder(monkeypatch: pytest.MonkeyPatch, place: InstallPlace) -> None:
    """Of which the Python reads no `.pth` file."""
    nothing = installation.Seen(origin=None, version=None, other=None, other_version=None)
    monkeypatch.setattr(installation, "look", lambda python, heeds_variable: nothing)


@pytest.mark.slow
@pytest.mark.parametrize("is_installed", [False, True])
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (full_disk, "ds_ssh: No space left on device; nothing is installed"),
        (unread_folder, "does not read .*site-packages when it starts"),
    ],
)
def test_an_installation_that_fails_leaves_all_as_it_was(
    break_it: Break, message: str, is_installed: bool, place: InstallPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_installed:
        list(install(place, is_dry_run=False))
        (place.scripts / "ds").unlink()  # so that there is something to do
    before = files_of(place)
    break_it(monkeypatch, place)
    with pytest.raises(LaunchError, match=message):
        list(install(place, is_dry_run=False))
    assert files_of(place) == before


@pytest.mark.slow
def test_what_is_left_of_a_killed_installation_can_be_installed_over(place: InstallPlace) -> None:
    list(install(place, is_dry_run=False))
    for name in COMMANDS:  # the record comes first
        (place.scripts / name).unlink()
    list(install(place, is_dry_run=False))
    assert run(place, "ds", "--help").returncode == 0


@pytest.mark.slow
def test_without_dslaunch_python_starts_and_the_commands_say_what_is_missing(
    place: InstallPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = str(tmp_path / "gone")
    for file in files_for(place, folder=gone, commands=gone):
        file.path.write_bytes(file.data)
        file.path.chmod(0o755)
    (place.packages / "tests.pth").unlink()
    (place.packages / "dslaunch").mkdir()  # as pip leaves it where something has been put into it since
    done = run(place, "python", "-c", "import sys; print(sys.path)")
    assert (done.returncode, done.stderr) == (0, "")
    assert gone not in done.stdout
    for name in COMMANDS:
        done = run(place, name, "--help")
        words = (
            f"{name}: {gone}/{name} or {place.python} is not there any more: install "
            "dslaunch again, or remove "
        )
        assert (done.returncode, done.stderr) == (127, f"{words}{place.scripts}/{name}\n")
    done = run(place, "python", str(place.scripts / CONVERTER))
    assert done.returncode == 1
    assert done.stderr.startswith(f"{CONVERTER}: dslaunch is not there any more: install it again for ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_python_that_cannot_say_what_it_finds_is_named_with_its_last_line(
    place: InstallPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.packages / "json.py").write_text("raise RuntimeError('hidden')")
    monkeypatch.setenv("PYTHONPATH", str(place.packages))
    words = f"{place.python} was asked which deepspeed it finds, and failed: "
    for limit_s, reason in ((60, "RuntimeError: hidden"), (0.001, "no answer for 0.001 s")):
        monkeypatch.setattr(seen, "_LIMIT_S", limit_s)
        with pytest.raises(LaunchError) as refused:
            list(install(place, is_dry_run=False))
        assert str(refused.value) == words + reason


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": {"../../../../precious": "x"}, "version": "1", "folder": "/"}']
)
def test_a_record_that_is_damaged_removes_nothing(text: str, place: InstallPlace) -> None:
    (place.packages / RECORD).write_text(text)
    with pytest.raises(
        LaunchError, match=rf"{RECORD} cannot be read: .*; remove it, and the files that begin with"
    ):
        list(uninstall(place, is_dry_run=False))
    assert (place.packages / RECORD).read_text() == text
