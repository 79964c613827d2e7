"""The programs in docs/examples/deepspeed run as their README says, on two ranks,
and give what is known of them.

One job runs all of them one after the other in the same two processes,
with the words of the README; two run as shown.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch import drop_in
from dslaunch.launcher.node.observe.devices import count_accelerators
from tests.docs.deepspeed_examples import BEGIN, NEXT
from tests.docs.test_examples import free_port

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = CHECKOUT / "docs" / "examples" / "deepspeed"
WORKER = Path(__file__).with_name("deepspeed_examples.py")
COMMAND = re.compile(r"^ {4}dslaunch --num_gpus 2 (docs/.+)$", re.MULTILINE)
COMMANDS = [line.split() for line in COMMAND.findall((EXAMPLES / "README.md").read_text())]
CHECKPOINTS = "/tmp/bert"  # of the README
FIRST = "localhost:0 | "
TIMEOUT_S = 400  # on a machine that does many other things; alone a command takes 10 s

# What is compared between stages beside the README's commands.
DIGITS = ("classify_digits.py", "--epochs", "1", "--stage")
WEIGHTS = ("edit_weights.py", "--stage")
DISTIL = ("distill.py", "--stage")
LORA = ("finetune_lora.py", "--zero_stage")
BY_STAGE = [
    *((*DIGITS, stage) for stage in "0123"),
    *((*WEIGHTS, stage) for stage in "012"),
    *((*DISTIL, stage) for stage in "03"),
    (*LORA, "2"),
    (*LORA, "3", "--offload"),
]

# Stages and offload add the same float32 numbers in another order; losses of 0.1 to 5 then differ by a few
# units of their seventh digit, which is the last that is printed.
SAME_LOSS = 5e-6

Sections = dict[tuple[str, ...], list[str]]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.skipif(count_accelerators() == 1, reason="2 workers need as many GPUs where there is one"),
]


def run(*words: str | Path, first_on_path: str = "") -> subprocess.CompletedProcess[str]:
    path = [first_on_path, str(Path(sys.executable).parent), os.environ["PATH"]]
    return subprocess.run(
        [*map(str, words)],
        cwd=CHECKOUT,
        env={**os.environ, "PATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def two_ranks() -> list[str]:
    return ["--num_gpus", "2", f"--master_port={free_port()}"]


def first_rank(output: str) -> list[str]:
    return [line.removeprefix(FIRST) for line in output.splitlines() if line.startswith(FIRST)]


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> Sections:
    """What rank 0 printed in each run, by the script's name and its words."""
    folder = str(tmp_path_factory.mktemp("bert"))
    shown = [(Path(script).name, *words) for script, *words in COMMANDS]
    runs = [*shown, *BY_STAGE]
    words: list[str] = []
    for script, *rest in runs:
        words += [NEXT, str(EXAMPLES / script), *(folder if one == CHECKPOINTS else one for one in rest)]
    preload = ("--preload", "torch,sklearn.datasets,transformers.trainer")  # imported once for both ranks
    done = run("dslaunch", *two_ranks(), *preload, "--no_local_rank", WORKER, *words[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    found: Sections = {}
    for line in first_rank(done.stdout):
        if line.startswith(BEGIN):
            found[runs[int(line.removeprefix(BEGIN))]] = []
        else:
            found[list(found)[-1]].append(line)
    assert list(found) == runs
    return found


def shown_as(sections: Sections, name: str) -> list[str]:
    """The lines of the first run of this script, which is as the README shows it."""
    return next(lines for run, lines in sections.items() if run[0] == name)


def losses(lines: list[str], name: str = "") -> list[float]:
    pattern = re.compile(rf"^step +\d+  loss (\S+).*{name}$")
    return [float(found[1]) for found in map(pattern.match, lines) if found]


def numbers(line: str) -> list[float]:
    return [float(one) for one in re.findall(r"\d+(?:\.\d+)?", line)]


def test_the_readme_shows_the_commands_that_the_scripts_show() -> None:
    in_scripts = [line for path in EXAMPLES.glob("*.py") for line in COMMAND.findall(path.read_text())]
    assert sorted(in_scripts) == sorted(" ".join(words) for words in COMMANDS)
    assert {Path(words[0]) for words in COMMANDS} == {
        path.relative_to(CHECKOUT) for path in EXAMPLES.glob("*.py")
    }


def test_no_script_knows_whose_deepspeed_it_gets() -> None:
    for path in EXAMPLES.glob("*.py"):
        imports = re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
        assert any(name.split(".")[0] == "deepspeed" for name in imports)
        assert not any(name.startswith("dslaunch") for name in imports)


@pytest.mark.timeout(300)  # nine trainings, one after the other
def test_the_commands_run_as_shown(sections: Sections) -> None:
    """By dslaunch, and by its command of DeepSpeed's name."""
    by_name = {Path(words[0]).name: words for words in COMMANDS}
    for name, command, folder in (
        ("edit_weights.py", "dslaunch", ""),
        ("classify_digits.py", "deepspeed", drop_in.BIN),
    ):
        program = Path(folder, command) if folder else command
        done = run(program, *two_ranks(), *by_name[name], first_on_path=folder)
        assert done.returncode == 0, done.stderr
        lines, alone = shown_as(sections, name), first_rank(done.stdout)
        assert losses(alone) == losses(lines)
        assert alone[-1] == lines[-1]


def test_digits_are_learned_in_16_bits(sections: Sections) -> None:
    lines = shown_as(sections, "classify_digits.py")
    found = losses(lines)
    assert len(found) == 64
    assert found[0] == pytest.approx(math.log(10), abs=0.05)
    assert sum(found[-8:]) / 8 < 0.25
    accuracy, num_images = numbers(lines[-1])
    assert (accuracy > 0.9, num_images) == (True, 261)
    lr = [float(one[1]) for one in (re.search(r"  lr (\S+)", line) for line in lines) if one]
    assert lr[9:] == [0.01] * 55  # warm since step 10
    assert lr[:9] == pytest.approx([0.01 * math.log(step) / math.log(10) for step in range(1, 10)], abs=1e-6)


@pytest.mark.parametrize(
    ("script", "num_steps"), [(DIGITS, 16), (WEIGHTS, 12), (DISTIL, 48)], ids=["digits", "weights", "distil"]
)
def test_the_stages_agree(sections: Sections, script: tuple[str, ...], num_steps: int) -> None:
    runs = [lines for words, lines in sections.items() if words[: len(script)] == script]
    assert len(runs) in (3, 4)
    wanted = losses(runs[0])
    assert len(wanted) == num_steps
    assert wanted[-1] < wanted[0] - 0.3
    for lines in runs[1:]:
        assert losses(lines) == pytest.approx(wanted, abs=SAME_LOSS)


def test_bert_learns_and_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(sections: Sections) -> None:
    whole, resumed = (lines for words, lines in sections.items() if words[0] == "pretrain_bert.py")
    width, num_words, length = 64, 36, 9
    layer = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width
    total = num_words * (width + 1) + length * width + 2 * layer + 2 * width
    assert f"parameters {total}" in whole
    assert any(line.startswith("cpu: in use") for line in whole) or count_accelerators()
    assert len(losses(whole)) == 24
    assert losses(whole)[-1] < 1 < math.log(num_words) < losses(whole)[0]
    assert losses(resumed) == losses(whole)[12:]


def test_lora_learns_whatever_the_stage_and_its_sum_is_worth_the_same(sections: Sections) -> None:
    runs = [lines for words, lines in sections.items() if words[0] == "finetune_lora.py"]
    assert len(runs) == 3
    for lines in runs:
        assert losses(lines) == pytest.approx(losses(runs[0]), abs=SAME_LOSS)
        found = [line for line in lines if line.startswith(("parameters", "perplexity"))]
        trained = (
            2 * 8 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 128) * 3)
        )  # layers, rank, what goes in and out
        assert found[0].split()[:3] == ["parameters", "trained", str(trained)]
        before, after = numbers(found[1])
        assert before == pytest.approx(32, rel=0.1)
        assert after < 0.75 * before
        assert numbers(found[2]) == [after]
        lr = [float(line.split()[-1]) for line in lines if " lr " in line]
        assert lr[1] == max(lr) == 0.01
        assert lr[-1] == 0


def test_weights_are_absent_then_whole_and_as_they_were_written(sections: Sections) -> None:
    for run_words, lines in sections.items():
        if run_words[0] != "edit_weights.py":
            continue
        is_sharded = run_words[-1] == "3"
        assert "sums [12.0, 32.0, 0.0, 0.0]" in lines
        assert lines[-1] == "the bias of 16 is 0.5 to 0.5 now"
        status = {
            line.split()[0]: line.split()[-1] for line in lines if line.startswith(("made", "gathered"))
        }
        assert status == (
            {"made:": "absent", "gathered:": "present"} if is_sharded else dict.fromkeys(status, "whole")
        )
        if is_sharded:
            numel = [numbers(line.partition("numel")[2])[0] for line in lines if line.startswith("made")]
            assert numel == [12 * 16, 16 * 16, 16, 12]


def test_three_engines_live_in_one_process(sections: Sections) -> None:
    lines = shown_as(sections, "distill.py")
    for name in ("teacher", "student"):
        found = losses(lines, name)
        assert len(found) == 24
        assert found[-1] < found[0] - 0.5
    teacher, student, lr = numbers(lines[-1])
    assert teacher > student > 0.7
    assert lr == 0


def test_devices_and_collectives_say_what_two_ranks_must(sections: Sections) -> None:
    lines = shown_as(sections, "devices_and_collectives.py")
    assert "all_reduce 3 max 1 broadcast [7.0, 7.0]" in lines
    assert "all_gather [0, 10] into [0.0, 0.5, 1.0, 1.5]" in lines
    assert "reduce_scatter 0 objects ['rank 0', 'rank 1'] group of 2" in lines
    assert "sum 256 and 6, on accelerator True" in lines
    if not count_accelerators():
        assert "device cpu backend gloo" in lines


def test_estimates_are_what_a_rank_holds(sections: Sections) -> None:
    lines = shown_as(sections, "estimate_memory.py")
    count = 16000 * 512 + 4 * (512 * 2048 * 2 + 2048 + 512)
    assert lines[0] == f"parameters {count}"
    rows = [tuple(numbers(line)[:2]) for line in lines if "offload_" in line and "GiB" in line]
    gib = 2**30
    largest, params, gpus = 250e6, 7e9, 32
    host = 1.5 * params * 4 * 8  # the model on each of 8 ranks, and half as much again for buffers
    expected = [
        (1.5 * params * max(4 * 8, 16), 2 * params),  # stage 2, optimizer in host memory
        (host, 2 * params + 16 * params / 8),
        (1.5 * params * 18 / 4, 4 * largest),  # stage 3, all in host memory, with and without zero.Init
        (host, 4 * largest),
        (1.5 * params * 16 / 4, 4 * largest + 2 * params / gpus),
        (host, 4 * largest + 2 * params / gpus),
        (1.5 * 4 * largest * 8, 4 * largest + 18 * params / gpus),
        (host, 4 * largest + 18 * params / gpus),
    ]
    wanted = [one / gib for row in expected for one in row]
    assert len(rows) == 16
    assert [one for row in rows[-8:] for one in row] == pytest.approx(wanted, abs=0.006)


def test_a_profile_counts_what_the_layers_multiply(sections: Sections) -> None:
    lines = shown_as(sections, "profile_flops.py")
    conv, linear = 8 * 8 * 8 * 9, 512 * 64 + 64 * 10
    macs, params = 4 * (conv + linear), 8 * 9 + 8 + 512 * 64 + 64 + 64 * 10 + 10
    assert f"alone: macs {macs} params {params} flops at least twice the macs True" in lines
    assert f"by hand: macs {macs} params {params} took time True" in lines
    found = next(line for line in lines if line.startswith("in training"))
    assert "Linear: 133.63 KMACs, Conv2d: 18.43 KMACs" in found
