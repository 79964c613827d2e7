"""`dslaunch checkpoint` on checkpoints of a real engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dslaunch
from dslaunch.launcher.command_line import cli, runtime_program
from dslaunch.launcher.errors import LaunchError
from dslaunch.runtime.checkpoint import inspect
from dslaunch.runtime.checkpoint.export.output_plan import size_text
from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.inspect import command, difference
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from tests.runtime.models import assert_same_bits, make_config, make_model, train_engine
from tests.runtime.ranks import process_group

STEPS = ("global_step1", "global_step2", "global_step3")


class Wider(nn.Module):
    """As Uneven in its names, where it has any, but not in all shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 16)
        self.last = nn.Linear(16, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x))
        return y


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints in `run`, and one of another model in `other`."""
    folder = tmp_path_factory.mktemp("made")
    with process_group(0, 1, str(folder / "store")):
        engine: Any = dslaunch.initialize(
            model=make_model(), config=make_config(stage=3, bf16={"enabled": True})
        )[0]
        for step, tag in enumerate(STEPS):
            train_engine(engine, steps=1, first=step, dtype=torch.bfloat16)
            if step == 2:
                engine.optimizer.param_groups[0]["lr"] = 0.5
            engine.save_checkpoint(folder / "run", tag)
        other: Any = dslaunch.initialize(model=make_model(Wider), config=make_config())[0]
        other.save_checkpoint(folder / "other")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """The three checkpoints, for one test to damage."""
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's program is called and not started: a process takes seconds to load torch."""

    def call(module: str, request: dict[str, Any], *, what: str) -> int:
        assert module == inspect.__name__.removeprefix("dslaunch.runtime.")
        return command.main(json.dumps(request))

    monkeypatch.setattr(runtime_program, "run_program", call)


class Ended:
    """What `dslaunch checkpoint` printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(["checkpoint", *map(str, words)])
        self.code = ended.value.code
        self.out, self.err = capsys.readouterr()


def test_ls_shows_each_checkpoint_and_what_is_none(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / STEPS[1] / "training.pt").write_bytes(b"cut off")
    (run / ".global_step4.partial").mkdir()
    (run / "not_one").mkdir()
    ended = Ended(capsys, "ls", run)
    assert (ended.code, ended.err) == (0, "")
    title, *lines = ended.out.splitlines()
    assert title.split("  ")[0] == "tag"
    cells = [line.split() for line in lines[:4]]
    assert [(line[0], line[-1]) for line in cells] == [
        (STEPS[0], "good"),
        (STEPS[1], "damaged"),
        (STEPS[2], "latest"),
        ("global_step4", "partial"),
    ]
    assert cells[2][1] == "3"
    assert cells[2][6:] == ["1", "3", "good", "latest"]
    assert lines[4].startswith(f"{run}/{STEPS[1]}/training.pt has 7 bytes instead of ")
    found = json.loads(Ended(capsys, "ls", run, "--json").out)
    assert [row["state"] for row in found] == ["good", "damaged", "good", "partial"]
    assert [row["is_latest"] for row in found] == [False, False, True, False]
    files = [path for path in (run / STEPS[2]).iterdir() if path.name != "manifest.json"]
    assert found[2]["num_bytes"] == sum(path.stat().st_size for path in files)
    assert found[2]["version"] == dslaunch.__version__


def test_ls_says_that_latest_names_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / STEPS[2])
    ended = Ended(capsys, "ls", run)
    assert ended.out.endswith(f"{run}/{STEPS[2]} is not there, or neither dslaunch nor DeepSpeed wrote it\n")
    assert "missing  latest" in ended.out


ADVICE = "load another one (`dslaunch checkpoint ls` shows which are good), or copy this one here once more"


@pytest.mark.timeout(60)  # a pipe without a writer would be waited for
def test_what_lies_in_a_file_s_place_is_named_and_not_waited_for(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests = [run / tag / "manifest.json" for tag in STEPS]
    manifests[0].unlink()
    os.mkfifo(manifests[0])
    manifests[1].write_bytes(manifests[1].read_bytes()[:-10])
    (run / "cut").mkdir()
    os.mkfifo(run / "cut" / "mp_rank_00_model_states.pt")
    (run / "latest").unlink()
    (run / "latest").mkdir()
    ended = Ended(capsys, "ls", run)
    assert (ended.code, ended.err) == (0, "")
    states = {line.split()[0]: line.split()[-1] for line in ended.out.splitlines()[1:6]}
    assert states == {
        "latest": "damaged",
        STEPS[0]: "damaged",
        STEPS[1]: "damaged",
        STEPS[2]: "good",
        "cut": "DeepSpeed",
    }
    held = ", ".join((STEPS[2], *STEPS[:2]))  # by the times of the manifests
    latest = (
        f"{run}/latest, a file with the name of a checkpoint, cannot be read: it is a folder; "
        f"move it away, or give a tag: the folder holds {held}"
    )
    pipe = f"{manifests[0]} cannot be read: it is no regular file; {ADVICE}"
    cut = f"{manifests[1]} cannot be read: JSONDecodeError: "
    problems = ended.out.splitlines()[6:]
    assert set(problems[:2]) == {latest, pipe}
    assert problems[2].startswith(cut)
    assert problems[2].endswith(f"; the checkpoint is damaged: {ADVICE}")
    assert problems[3] == (
        f"{run}/cut/mp_rank_00_model_states.pt cannot be read: it is no regular file; load another checkpoint"
    )
    for words, code, message in (
        (("verify", run), 2, latest),
        (("verify", run, STEPS[0]), 1, pipe),
        (("export", run, run / "out", "--tag", STEPS[0]), 2, pipe),
    ):
        ended = Ended(capsys, *words)
        assert (ended.code, ended.err) == (code, f"dslaunch: {message}\n")


def test_ls_shows_what_deepspeed_wrote(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the keys of a file of its 0.19.8; what it saves itself is in test_deepspeed_import.py."""
    head = {
        "ds_config": {"zero_optimization": {"stage": 2}},
        "global_steps": 7,
        "dp_world_size": 4,
        "ds_version": "0.19.8",
    }
    for tag, saved in (("global_step7", head), ("odd", {"module": {}})):
        (run / tag).mkdir()
        torch.save(saved, run / tag / "mp_rank_00_model_states.pt")
    (run / "cut").mkdir()
    (run / "cut" / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    (run / "latest").write_text("global_step7")
    lines = Ended(capsys, "ls", run).out.splitlines()
    cells = next(line.split() for line in lines if line.startswith("global_step7"))
    assert (cells[1], cells[-4:]) == ("7", ["4", "2", "DeepSpeed", "latest"])
    assert f"{run}/odd is not as DeepSpeed 0.19 writes checkpoints: KeyError('ds_config')" in lines
    assert any(line.startswith(f"{run}/cut/mp_rank_00_model_states.pt cannot be read") for line in lines)
    rows = {row["tag"]: row for row in json.loads(Ended(capsys, "ls", run, "--json").out)}
    assert (
        rows["global_step7"]["num_bytes"]
        == (run / "global_step7" / "mp_rank_00_model_states.pt").stat().st_size
    )
    assert [rows[tag]["state"] for tag in (*STEPS, "global_step7", "odd", "cut")] == ["good"] * 3 + [
        "DeepSpeed"
    ] * 3


@pytest.mark.parametrize(("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (999_499, "999 KB"), (1_234_000, "1.23 MB"),
     (99_960_000, "100 MB"), (7 * 10**15, "7000 TB")])  # fmt: skip
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_verify_names_the_file_and_bytes_that_are_damaged(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = Ended(capsys, "verify", run, STEPS[0])
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"{run}/{STEPS[0]}: good; ")
    path = run / STEPS[2] / "__0_0.distcp"
    with path.open("r+b") as file:
        file.seek(-40_000 if path.stat().st_size > 40_000 else -1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    ended = Ended(capsys, "verify", run)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"dslaunch: {path} is damaged between bytes ")
    (run / STEPS[1] / "__0_0.distcp").unlink()
    ended = Ended(capsys, "verify", run / STEPS[1])
    assert ended.code == 1
    assert "__0_0.distcp is missing" in ended.err
    ended = Ended(capsys, "verify", run, "global_step9")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "global_step9 is no checkpoint" in ended.err


def test_diff_of_a_checkpoint_with_itself_is_empty(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = Ended(capsys, "diff", made / "run", made / "run" / STEPS[2], "--values")
    num = len(CheckpointReader(open_store(made / "run"), STEPS[2]).tensors())
    assert ended.code == 0
    assert ended.out.endswith(f"{num} of {num} tensors have the same bits\nno difference\n")


def test_diff_shows_the_numbers_counters_and_hyper_parameters_that_changed(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (made / "run" / tag for tag in STEPS[1:])
    found = json.loads(Ended(capsys, "diff", a, b, "--values", "--json").out)
    settings = {one["name"]: (one["a"], one["b"]) for one in found["settings"]}
    assert settings["progress.global_steps"] == (2, 3)
    assert settings["optimizer.num_steps"] == (2, 3)
    assert settings["optimizer.groups[0].lr"] == (0.01, 0.5)
    assert found["only_in_a"] == found["only_in_b"] == found["tensors"] == []
    left, right = (CheckpointReader(open_store(made / "run"), tag) for tag in STEPS[1:])
    expected = {}
    for name in left.tensors():
        one, other = left.tensor(name), right.tensor(name)
        if not torch.equal(one, other):
            apart = (one.double() - other.double()).abs()
            expected[name] = (int((one != other).sum()), float(apart.max()))
    assert len(expected) > 20
    assert {one["name"]: (one["num_differing"], one["greatest"]) for one in found["values"]} == expected
    ended = Ended(capsys, "diff", a, b)
    assert ended.code == 1
    assert "progress.global_steps: 2 in A, 3 in B\n" in ended.out
    assert "elements differ" not in ended.out


def test_diff_shows_other_names_shapes_and_dtypes(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = Ended(capsys, "diff", made / "run", made / "other")
    assert ended.code == 1
    lines = ended.out.splitlines()
    assert "only in A: optimizer.state.norm.weight.exp_avg" in lines
    assert "model.first.weight: (15, 7) of bfloat16 in A, (16, 7) of float32 in B" in lines
    assert "config.zero_optimization.stage: 3 in A, 0 in B" in lines


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), (0, 0.0)),
        (torch.tensor([0.0, 2.0]), torch.tensor([-0.0, 2.0]), (1, 0.0)),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.5, 1.0]), (2, float("inf"))),
        (torch.tensor([True, False]), torch.tensor([True, True]), (1, 1.0)),
        (torch.tensor([1 << 40]), torch.tensor([3]), (1, float((1 << 40) - 3))),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), (1, 5.0)),
        (torch.empty(0), torch.empty(0), (0, 0.0)),
    ],
)
def test_what_differs_is_counted_in_bits(a: Tensor, b: Tensor, expected: tuple[int, float]) -> None:
    assert difference._compare(a, b) == expected


def test_prune_removes_what_its_dry_run_shows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "latest").write_text(STEPS[0])
    ended = Ended(capsys, "prune", run, "--keep", 1, "--dry_run")
    assert (ended.code, ended.out) == (0, f"would remove {run}/{STEPS[1]}\n")
    assert open_store(run).tags() == [*STEPS]
    ended = Ended(capsys, "prune", run, "--keep", 1)
    assert (ended.code, ended.out) == (0, f"removed {run}/{STEPS[1]}\n")
    assert open_store(run).tags() == [STEPS[0], STEPS[2]]
    ended = Ended(capsys, "prune", run, "--keep", 2)
    assert (ended.code, ended.out) == (0, f"nothing to remove: {run} has 2 checkpoints, --keep 2\n")


def test_export_writes_the_weights(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "weights"
    ended = Ended(capsys, "export", made / "run", out, "--tag", STEPS[0], "--dtype", "bfloat16")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"{out}/model.safetensors: 1 file, ")
    reader = CheckpointReader(open_store(made / "run"), STEPS[0])
    assert_same_bits(load_file(out / "model.safetensors"), reader.state_dict())
    options = ("--format", "bin", "--max_shard_size", "2KB")
    assert Ended(capsys, "export", made / "run", out, *options).code == 0
    index = json.loads((out / "pytorch_model.bin.index.json").read_text())["weight_map"]
    state = {name: torch.load(out / file)[name] for name, file in index.items()}
    reader = CheckpointReader(open_store(made / "run"), STEPS[2])
    assert_same_bits({n: v.bfloat16() for n, v in state.items()}, reader.state_dict())


def test_mistakes_are_one_line_and_exit_code_2(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (("ls", tmp_path), f"{tmp_path} holds no checkpoint; give the folder"),
        (("prune", tmp_path, "--keep", 2), f"{tmp_path} holds no checkpoint"),
        (("verify", tmp_path), f"{tmp_path}/latest does not exist"),
        (("diff", made / "run", tmp_path), f"{tmp_path}/latest does not exist"),
        (("export", made / "run", tmp_path, "--max_shard_size", "few"), "'few' is no size"),
        (("ls", "nosuch://bucket/run"), "nosuch://bucket/run: "),
    ):
        ended = Ended(capsys, *words)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("dslaunch: ")
        assert ended.err.count("\n") == 1
        assert message in ended.err


def test_urls_are_as_good_as_folders(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(str(made / "run"), "/bucket/run", recursive=True)
    url = "memory://bucket/run"
    fs.rm_file(f"/bucket/run/{STEPS[0]}/manifest.json")
    states = [row["state"] for row in json.loads(Ended(capsys, "ls", url, "--json").out)]
    assert sorted(states) == ["good", "good", "partial"]
    assert Ended(capsys, "verify", url).code == 0
    assert Ended(capsys, "diff", url, made / "run", "--values").code == 0
    assert Ended(capsys, "diff", f"{url}/{STEPS[1]}", made / "run").code == 1
    assert Ended(capsys, "prune", url, "--keep", 1).out == f"removed {url}/{STEPS[1]}\n"
    assert Ended(capsys, "export", url, "memory://bucket/out").code == 0
    assert fs.exists("/bucket/out/model.safetensors")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command_starts_the_runtime_beside_a_file_that_is_called_torch(
    made: Path, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(9)")
    (tmp_path / "link").symlink_to(made / "run")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "dslaunch"), "checkpoint", "verify", "link"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/link/{STEPS[2]}: good; ")


@pytest.fixture
def broken_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch is found and cannot be imported, which takes no time either."""
    package = tmp_path / "path" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open it\\nand more')")
    return {**os.environ, "PYTHONPATH": str(package.parent)}


def test_where_torch_cannot_be_imported_it_says_why(broken_torch: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(9)")  # which is not the one that is asked for
    words = [str(Path(sys.executable).parent / "dslaunch"), "checkpoint", "ls", "out"]
    done = subprocess.run(words, env=broken_torch, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"dslaunch: dslaunch checkpoint needs torch, and {sys.executable} cannot import it: OSError: "
        "libcudart.so.12: cannot open it; install a torch for this machine, then try: "
        f"{sys.executable} -c 'import torch'\n"
    )


@pytest.mark.parametrize("stderr", [">/dev/full", ">&-"])
def test_the_exit_code_is_the_same_where_stderr_takes_nothing(
    stderr: str, broken_torch: dict[str, str]
) -> None:
    line = f"{Path(sys.executable).parent / 'dslaunch'} checkpoint ls out 2{stderr}"
    done = subprocess.run(["sh", "-c", line], env=broken_torch, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_message_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert command.main(json.dumps({"action": "ls", "folder": "out", "json": False})) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("dslaunch: ")
    assert all(len(line) <= 40 or " " not in line.strip() for line in lines)


def test_a_reader_that_goes_away_ends_it_as_sigpipe_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(given: dict[str, object]) -> int:
        raise BrokenPipeError

    monkeypatch.setitem(command._ACTIONS, "ls", gone)
    monkeypatch.setattr(command, "os", Mock())  # stdout stays pytest's
    assert command.main(json.dumps({"action": "ls", "folder": "out"})) == 128 + signal.SIGPIPE


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real one
    monkeypatch.setattr(runtime_program, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"pip install '\.\[train\]' in a clone"):
        runtime_program.run_program("checkpoint.command", {}, what="dslaunch checkpoint")
