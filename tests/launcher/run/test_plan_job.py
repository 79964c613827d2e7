"""`dslaunch plan` from the command line: an example whole, and what is refused."""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.fit import rehearse
from dslaunch.launcher.run import plan_job

CHECKOUT = Path(__file__).resolve().parents[3]
EXAMPLES = CHECKOUT / "docs" / "examples"
PAGE = CHECKOUT / "docs" / "train" / "will-it-fit.md"
HOSTS = "node[1-2]:2"
PROGRAM = ("train_chars.py", "--deepspeed", "--deepspeed_config", "ds_config_chars.json")


def planned(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *words])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


@pytest.mark.slow
def test_an_example_is_planned_for_two_hosts_that_are_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    code, out, err = planned("-H", HOSTS, "--gpu", "A10", "--json", *PROGRAM, capsys=capsys)
    assert code == 0, err
    found = json.loads(out)
    assert found["verdict"].startswith("fits: 1.0 of 22.1 GiB on rank 0 in step 1 (backward")
    assert [host["name"] for host in found["hosts"]] == ["node1", "node2"]
    (rank,) = found["ranks"]
    assert rank["alike"] == [0, 1, 2, 3]
    assert rank["model"] == {**rank["model"], "num_trained": 366_432, "stage": 1, "micro_batch_size": 16}
    (peak,) = (phase["peaks"]["device"] for phase in rank["phases"] if phase["name"] == "step 2: backward")
    assert peak["kinds"]["parameters"] == pytest.approx(366_432 * 4, rel=0.01)
    assert peak["bytes"] == sum(peak["kinds"].values())
    assert list(found) == re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)


def test_a_program_that_fails_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os\nos._exit(7)\n")
    code, _, err = planned("-H", HOSTS, "--gpu", "A10", "train.py", capsys=capsys)
    assert code == 2
    assert "the rehearsal of rank 0 has ended with exit code 7 and without an answer" in err
    (tmp_path / "train.py").write_text(
        "import os\nopen('left', 'w').write('x'); os.remove('train.py')\nraise ValueError('no data')\n"
    )
    code, _, err = planned("-H", HOSTS, "--gpu", "A10", "train.py", capsys=capsys)
    assert code == 2
    assert "train.py:3: cannot be rehearsed as rank 0, where no tensor has values: ValueError: no data" in err
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]  # it was held back from the files
    (tmp_path / "train.py").write_text(
        "import dslaunch, torch\ndslaunch.initialize(model=torch.nn.Linear(2, 2))"
    )
    code, _, err = planned("-H", HOSTS, "--gpu", "A10", "train.py", capsys=capsys)
    assert code == 2
    assert "train.py:2: a run ends here, too: " in err
    assert "--model" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('trained')", "train.py: a run ends here, too: the program ends without a step of an engine;"),
        (
            "raise SystemExit",
            "the program ends without a step of an engine; give one that calls initialize()",
        ),
        ("input('samples: ')", "EOF when reading a line (standard input is empty in a rehearsal); plan its"),
        ("samples", "train.py:1: a run ends here, too: NameError: name 'samples' is not defined"),
    ],
)
def test_an_end_is_told_with_what_it_comes_from(
    text: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    code, _, err = planned("-H", HOSTS, "--gpu", "A10", "train.py", capsys=capsys)
    assert (code, message in " ".join(err.split())) == (2, True), err


def test_a_program_that_refuses_its_arguments_is_told_with_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank')\n"
        "parser.parse_args()\n"
    )
    code, _, err = planned("-H", HOSTS, "--gpu", "A10", "train.py", "--size", "9", capsys=capsys)
    assert code == 2
    assert (
        "train.py:4: the program ends with exit code 2: train.py: error: unrecognized arguments: --size 9; "
        "its command is: train.py --local_rank=0 --size 9"
    ) in " ".join(err.split())
    assert "samples" not in err


@pytest.mark.slow
def test_at_the_time_limit_the_line_is_named_at_which_the_program_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on by an hour when the program says that it has begun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "train.py").write_text("import threading\nprint('begun')\nthreading.Event().wait()\n")

    class Clock:
        sleep = time.sleep

        @staticmethod
        def monotonic() -> float:
            has_begun = any("begun" in one.read_text() for one in tmp_path.rglob("output.txt"))
            return time.monotonic() + 3600 * has_begun

    monkeypatch.setattr(rehearse, "time", Clock)
    code, _, err = planned("-H", HOSTS, "--gpu", "A10", "train.py", capsys=capsys)
    assert code == 2
    assert re.search(
        r"the rehearsal of rank 0 has not reached .* in 10 min 0 s, and is at \S*train\.py:3; give it more",
        " ".join(err.split()),
    ), err


SAVING = """
import torch
import dslaunch

engine, *_ = dslaunch.initialize(model=torch.nn.Linear(512, 512), config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2}, "checkpoint": {"async_save": %s},
})
while True:
    engine.backward(engine(torch.ones(1, 512)).sum())
    engine.step()
    engine.save_checkpoint("saved")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_program_that_saves_in_its_first_step_is_planned(
    is_async: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SAVING % is_async)
    code, out, err = planned("-H", HOSTS, "--gpu", "none", "--json", "train.py", capsys=capsys)
    assert code == 0, err
    (rank,) = json.loads(out)["ranks"]
    names = [one["name"] for one in rank["phases"]]
    assert names.count("saving a checkpoint") == (1 if is_async else 2)
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


PIPELINE = """
import sys
import torch
import dslaunch
from torch import nn

dslaunch.init_distributed()
layers = [dslaunch.LayerSpec(nn.Linear, 64, 64) for _ in range(4)]
model = dslaunch.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, schedule=sys.argv[-1])
config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4,
          "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
engine, *_ = dslaunch.initialize(model=model, config=config)
while True:
    engine.train_batch(iter([(torch.ones(8, 64), torch.ones(8, 64))] * 4))
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.exhaustive)])
def test_the_stages_that_a_program_makes_are_planned(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --mesh. With two stages on each rank the first rank takes what the second one sends."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PIPELINE)
    code, out, err = planned("-H", HOSTS, "--gpu", "A10", "--json", "train.py", schedule, capsys=capsys)
    assert code == 0, err
    found = json.loads(out)
    assert found["mesh"] == {"pp": 2, "dp": 2, "ep": 1, "sp": 1, "tp": 1}
    assert [(one["place"], one["alike"]) for one in found["ranks"]] == [
        ("stage 0 of 2", [0, 1]), ("stage 1 of 2", [2, 3])
    ]  # fmt: skip
    # outputs go on and gradients back: between two stages, and between four
    num_messages = 4 * {"1f1b": 1, "interleaved": 3}[schedule]
    for one in found["ranks"]:
        (sent,) = (part["bytes"] for part in one["steps"][-1]["sent"] if part["axis"] == "pp")
        assert sent == {"send": num_messages * 8 * 64 * 4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train.py", "which GPUs do the hosts have? They are not looked at; give --gpu=A10"),
        ("--gpu H10 train.py", "--gpu=H10: no GPU of this name is known; did you mean H100? there are A10,"),
        ("--gpu A10 gone.py", "no script "),
        ("--gpu_memory 24 train.py", "'24' is not allowed; give a number with a unit, e.g. 24GB or 22.5GiB"),
        ("--gpu none --gpu_memory 24GB train.py", "--gpu=none says that there are no GPUs, and --gpu_memory"),
        ("--gpu A10 --no_python train.sh", "--no_python: only a Python program can be rehearsed"),
        ("--gpu A10 --model . train.py", "--model has no batch; add --batch=4x2048, samples and tokens"),
        (
            "--gpu A10 --batch 4x8 train.py",
            "--batch has no effect without --model; add --model=FOLDER, or leave",
        ),
        (
            "--gpu A10 --lengths lengths.txt train.py",
            "--lengths has no effect without --model: the lengths of a program's samples come from its data;",
        ),
        ("--gpu A10 --out x.json train.py", "--out has no effect without --suggest; add --suggest, or leave"),
        (
            "--gpu none --speeds nosuch.json train.py",
            "--speeds=nosuch.json: cannot be read: No such file or directory; give a file that can",
        ),
        ("--gpu A10 --from_run nosuch train.py", "nosuch: no such file or folder, and no job 'nosuch' is kn"),
        ("--gpu A10", "which script? Write: dslaunch plan [options] script.py [its arguments]"),
    ],
)
def test_mistakes_say_what_to_give(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_job, "rehearse", None)
    code, _, err = planned("-H", HOSTS, *words.split(), capsys=capsys)
    assert (code, message in " ".join(err.split())) == (2, True), err
