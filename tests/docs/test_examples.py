"""The programs in docs/examples run as the documents say, as real jobs on this machine."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dslaunch.launcher.node.observe.devices import count_accelerators
from dslaunch.runtime.config import load_config
from tests.exhaustive import few

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = CHECKOUT / "docs" / "examples"
CONFIGS = sorted(EXAMPLES.glob("ds_config_*.json"))
TIMEOUT_S = 280  # a job takes 5 to 20 s here; below the time limit of one test
NUM_DIGITS_STEPS = 128

# Two ranks add the same float32 numbers in another order. Over all 128 steps the losses then differ
# by less than 5e-7; a single wrong sample in a batch, or a gradient that is not averaged, moves them
# by more than 1e-3.
LOSS_TOLERANCE = 1e-5

STEP_LOSS = re.compile(r"^localhost:0 \| step +\d+  loss (\S+)  epoch \d+$", re.MULTILINE)
ACCURACY = re.compile(r"^localhost:0 \| test after   accuracy (\S+)$", re.MULTILINE)


def test_all_programs_print_a_step_in_the_same_form() -> None:
    programs = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("deepspeed/*.py")]
    forms = [form for path in programs for form in re.findall(r'f"(step [^"]*)"', path.read_text())]
    assert len(forms) == 10
    assert [one for one in forms if re.match(r"step \{[\w.()]+:4d\}  loss \{", one) is None] == []


def launch(*words: str | Path, num_ranks: int, preload: str = "") -> subprocess.CompletedProcess[str]:
    """Run `dslaunch WORDS...` with so many local workers to its end.

    `preload`: modules that are imported once for all of them. Every program also runs without,
    as its document says.
    """
    if 0 < count_accelerators() < num_ranks:
        pytest.skip(f"{num_ranks} workers need as many GPUs where there is one")
    return subprocess.run(
        [
            *(sys.executable, "-m", "dslaunch", *local_options(num_ranks)),
            *([f"--preload={preload}"] if preload else []),
            *map(str, words),
        ],
        cwd=CHECKOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def local_options(num_ranks: int) -> list[str]:
    return ["--launcher=local", f"--num_gpus={num_ranks}", f"--master_port={free_port()}"]


def free_port() -> int:
    """A port of our own: two test runs on one machine that start a job at the same moment
    would both take 29500.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def with_config(program: str, config: Path | None = None) -> tuple[str | Path, ...]:
    name = program.removeprefix("train_").removesuffix(".py")
    return (
        EXAMPLES / program,
        "--deepspeed",
        "--deepspeed_config",
        config or EXAMPLES / f"ds_config_{name}.json",
    )


# ---- the configs


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_is_valid_and_every_key_of_it_is_used(
    path: Path, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(path, world_size=world_size)
    assert config.optimizer is not None
    assert caplog.messages == []


# ---- check_collectives.py


@pytest.mark.exhaustive
@pytest.mark.slow
def test_check_collectives_lists_the_ranks_and_times_every_operation() -> None:
    num_ranks = 3
    done = launch(EXAMPLES / "check_collectives.py", "--megabytes", "1", num_ranks=num_ranks, preload="torch")
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("localhost:0 | ") for line in done.stdout.splitlines()]
    assert lines[0].split() == ["rank", "world", "size", "local", "rank", "host", "device", "backend"]
    workers = [line.split()[:3] for line in lines[1 : num_ranks + 1]]
    assert workers == [[str(rank), str(num_ranks), str(rank)] for rank in range(num_ranks)]
    operations = [re.split(r" +ok +", line)[0] for line in lines[num_ranks + 1 : -1]]
    assert operations == [
        "broadcast",
        "send/recv latency",
        "send/recv",
        "all_reduce",
        "all_gather",
        "barrier",
    ]
    assert lines[-1] == f"check_collectives: OK, {num_ranks} ranks on 1 host"


BROKEN_ALL_REDUCE = """
import os, runpy, sys
import torch.distributed as dist

sound_all_reduce = dist.all_reduce

def all_reduce(tensor):
    if os.environ["RANK"] == "1":
        {before}
    sound_all_reduce(tensor)
    if os.environ["RANK"] == "1":
        {after}

dist.all_reduce = all_reduce
sys.argv = [sys.argv[1], "--megabytes", "0.001"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "pass",
            "tensor[3] += 1",
            (
                "check_collectives: all_reduce is wrong on rank 1; rank 1 got 8 at element 3 of 250, "
                "expected 7 (1 differ)"
            ),
        ),
        ("os._exit(0)", "pass", "check_collectives: all_reduce broke on rank 0 ("),
    ],
    ids=["a wrong element", "a rank that is gone"],
)
def test_check_collectives_names_the_operation_and_the_rank(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    program = tmp_path / "broken.py"
    program.write_text(BROKEN_ALL_REDUCE.format(before=before, after=after))
    words = ("--no_local_rank", program, EXAMPLES / "check_collectives.py")
    done = launch(*words, num_ranks=2, preload="torch")
    assert done.returncode == 1
    assert f"localhost:0 | {message}" in done.stderr
    assert "Traceback" not in done.stderr
    assert "OK" not in done.stdout


# ---- train_digits.py


DIGITS_IMPORTS = "torch,sklearn.datasets"


def train_digits(
    losses: Path, *more: str, num_ranks: int, stage: int, preload: str = ""
) -> tuple[list[float], float]:
    """Every step's loss, and the accuracy on the test set."""
    words = (*with_config("train_digits.py"), "--stage", str(stage), "--log_losses", losses, *more)
    done = launch(*words, num_ranks=num_ranks, preload=preload)
    assert done.returncode == 0, done.stderr
    result = ACCURACY.search(done.stdout)
    assert result, done.stdout
    written = losses.read_text().split()
    assert [f"{float(loss):.4f}" for loss in written] == STEP_LOSS.findall(done.stdout)
    return [float(loss) for loss in written], float(result[1])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], float]:
    return train_digits(tmp_path_factory.mktemp("digits") / "losses", num_ranks=1, stage=0)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_train_digits_learns_the_digits(one_process: tuple[list[float], float]) -> None:
    losses, accuracy = one_process
    assert len(losses) == NUM_DIGITS_STEPS
    assert losses[0] == pytest.approx(math.log(10), abs=0.1)
    assert losses[-1] < 0.1
    assert accuracy > 0.95


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "preload", "num_epochs"), [(0, DIGITS_IMPORTS, 8), (1, DIGITS_IMPORTS, 2)])
def test_two_ranks_train_digits_as_one_process_does_step_by_step(
    one_process: tuple[list[float], float], tmp_path: Path, stage: int, preload: str, num_epochs: int
) -> None:
    losses, accuracy = train_digits(
        tmp_path / "losses", f"--epochs={num_epochs}", num_ranks=2, stage=stage, preload=preload
    )
    expected_losses, expected_accuracy = one_process
    expected_losses = expected_losses[: num_epochs * NUM_DIGITS_STEPS // 8]
    differences = [abs(loss - wanted) for loss, wanted in zip(losses, expected_losses, strict=True)]
    assert max(differences) < LOSS_TOLERANCE, f"first at step {differences.index(max(differences)) + 1}"
    assert num_epochs < 8 or accuracy == expected_accuracy


@pytest.mark.exhaustive
@pytest.mark.slow
def test_accumulated_micro_batches_give_the_losses_of_whole_batches(
    one_process: tuple[list[float], float], tmp_path: Path
) -> None:
    config = json.loads((EXAMPLES / "ds_config_digits.json").read_text())
    path = tmp_path / "accumulate.json"
    path.write_text(json.dumps({**config, "gradient_accumulation_steps": 4}))
    words = (*with_config("train_digits.py", path), "--epochs", "2", "--log_losses", tmp_path / "losses")
    done = launch(*words, num_ranks=2, preload=DIGITS_IMPORTS)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in (tmp_path / "losses").read_text().split()]
    assert losses == pytest.approx(one_process[0][: len(losses)], abs=LOSS_TOLERANCE)
    assert len(losses) == NUM_DIGITS_STEPS // 4


# ---- train_chars.py


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "stage"), few([("fp32", 1), ("bf16", 0)], lambda precision, stage: stage == 1)
)
def test_train_chars_prints_its_progress_and_writes_metrics_and_memory(
    tmp_path: Path, precision: str, stage: int
) -> None:
    config = json.loads((EXAMPLES / "ds_config_chars.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "bf16": {"enabled": precision == "bf16"}}))
    out = tmp_path / "out"
    words = (*with_config("train_chars.py", path), "--stage", str(stage), "--steps", "12", "--out", out)
    done = launch(*words, num_ranks=2, preload="torch" if precision == "bf16" else "")
    assert done.returncode == 0, done.stderr
    assert f"parameters in {precision}, ZeRO stage {stage}, 2 ranks on" in done.stdout
    assert re.findall(r"^localhost:0 \| step +(\d+)  loss ", done.stdout, re.MULTILINE) == ["1", "10", "12"]

    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in metrics] == list(range(1, 13))
    assert all(one["tokens_per_s"] > 0 for one in metrics)
    assert metrics[0]["loss"] == pytest.approx(math.log(256), abs=0.3)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    memory = json.loads((out / "memory.json").read_text())
    assert [one["rank"] for one in memory] == [0, 1]
    assert all(one["max_rss_bytes"] > 50 * 2**20 for one in memory)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("program", ["train_digits.py", "train_chars.py"])
def test_a_training_without_a_config_says_which_one_to_give(program: str) -> None:
    done = launch(EXAMPLES / program, num_ranks=1)
    assert done.returncode == 2
    assert f"--deepspeed_config {with_config(program)[-1].relative_to(CHECKOUT)}" in done.stderr  # type: ignore[union-attr]


# ---- finetune_lora.py


@pytest.mark.exhaustive
@pytest.mark.slow
def test_finetune_lora_learns_shards_the_base_and_saves_an_adapter_that_is_worth_the_same(
    tmp_path: Path,
) -> None:
    words = (EXAMPLES / "finetune_lora.py", "--steps", "30", "--out", tmp_path)
    done = launch(*words, num_ranks=2, preload="torch,transformers,peft")
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r" step +\d+  loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 30
    assert losses[0] == pytest.approx(math.log(32), abs=0.1)
    assert losses[-1] < losses[0] - 1

    tests = re.findall(r" test (\w+) +loss (\S+)  accuracy (\S+)", done.stdout)
    assert [when for when, *_ in tests] == ["before", "after", "loaded"]
    assert tests[2][1:] == tests[1][1:]
    assert float(tests[0][2]) < 0.1
    assert float(tests[1][2]) > 0.6

    memory = re.findall(r" (\w+) +([\d,]+) parameters +(\S+) MiB per rank of 2, (\S+) MiB", done.stdout)
    assert [row[:2] for row in memory] == [("trained", "65,536"), ("frozen", "596,096")]
    for _, _, own, whole in memory:
        assert float(own) == pytest.approx(float(whole) / 2, rel=0.02)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["adapter_model.safetensors"]
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 65_536 * 4 * 1.05


# ---- lora_text.py


def make_base_with_tokenizer(folder: Path, text: str) -> None:
    """A small Qwen2 with random weights, and a tokenizer of its kind, made of `text`."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator([text], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    learned.save_model(str(folder.parent))
    vocab = json.loads((folder.parent / "vocab.json").read_text())
    merges = [
        tuple(line.split()) for line in (folder.parent / "merges.txt").read_text().splitlines()[1:]
    ]  # behind the version
    Qwen2Tokenizer(vocab=vocab, merges=merges, pad_token="<|endoftext|>").save_pretrained(folder)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(vocab),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).save_pretrained(folder)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_lora_text_learns_a_text_and_saves_the_adapter_alone(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog\n\n" * 32
    (tmp_path / "lines.txt").write_text(text)
    make_base_with_tokenizer(tmp_path / "base", text)
    words = ("--model", tmp_path / "base", "--text", tmp_path / "lines.txt", "--out", tmp_path / "adapter")
    more = ("--epochs", "3", "--length", "16", "--micro_batch", "2")
    done = launch(EXAMPLES / "lora_text.py", *words, *more, num_ranks=2, preload="torch,transformers,peft")
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r" step +\d+  loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 3 * 32 // 4
    assert losses[0] == pytest.approx(math.log(300), abs=0.3)
    assert losses[-1] < losses[0] - 0.1
    assert [path.name for path in (tmp_path / "adapter").glob("*.safetensors")] == [
        "adapter_model.safetensors"
    ]


# ---- demo.py

SHORT_DEMO = f"""
import sys
sys.path[:0] = [{str(CHECKOUT)!r}, {str(EXAMPLES)!r}]
import demo
from pathlib import Path
from tests.lab import Lab

out, demo.OUT = demo.OUT, Path(sys.argv[1])
job = demo.JOB.replace(str(out), sys.argv[1]).replace("--steps 300", sys.argv[2])
demo.JOB = "--master_port=" + sys.argv[3] + " " + job
demo.MEMORY_JOB = "--master_port=" + sys.argv[3] + " " + demo.MEMORY_JOB.replace(str(out), sys.argv[1])
Lab.can_be_made = staticmethod(lambda: "a test asked for none")
sys.exit(demo.main())
"""


def start_short_demo(out: Path, options: str) -> subprocess.Popen[str]:
    if count_accelerators():
        pytest.skip("the demo starts fewer workers on a machine with one GPU")
    command = [sys.executable, "-c", SHORT_DEMO, str(out), options, str(free_port())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_demo_runs_the_command_it_shows_and_draws_the_loss(tmp_path: Path) -> None:
    with start_short_demo(tmp_path, "--steps 10") as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert "demo: two local processes instead of two hosts: a test asked for none" in output
    assert "$ dslaunch --launcher=local --num_gpus=2 --master_port=" in output
    for row in ("loss", "speed", "reach the hosts", "start the workers", "rank 0 on", "rank 1 on"):
        assert re.search(rf"^\W*{row} ", output, re.MULTILINE), row
    for picture in ("loss.png", "why.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    held = json.loads((tmp_path / "memory_by_stage.json").read_text())["bytes"]
    # of 16 bytes: 2 ranks share 8 of states, then 4 of gradients, then 4 of parameters
    shares = [held[f"stage {stage}"] / held["PyTorch, 1 process"] for stage in range(4)]
    assert shares == pytest.approx([1, 3 / 4, 5 / 8, 1 / 2], rel=0.02)
    assert len(re.findall(r"a model: stage \d.* MiB on a rank", output)) == 4
    commands = re.findall(r"^    ((?:dslaunch|make) .*)\n        \w.*$", output, re.MULTILINE)
    assert len(commands) == 3
    assert output.rstrip().endswith("which page answers what")
    runs, checks, reads = commands
    assert all((CHECKOUT / word).is_file() for word in runs.split() if word.startswith("docs/"))
    assert checks.startswith("dslaunch check")
    assert f"\n{reads.removeprefix('make ')}: setup\n" in (CHECKOUT / "Makefile").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_that_fails_gives_the_demo_its_exit_code(tmp_path: Path) -> None:
    with start_short_demo(tmp_path, "--stage 7") as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2, output
    assert output.endswith("demo: the job ended with exit code 2\n")
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_demo_stops_its_job_when_it_is_interrupted(tmp_path: Path) -> None:
    with start_short_demo(tmp_path, "--steps 1000000") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        before = list(until_stepping(lines, tmp_path))
        process.send_signal(signal.SIGINT)
        after = list(lines)
    assert process.returncode == 128 + signal.SIGINT, "".join([*before, *after])
    assert "demo: stopping the job\n" in after
    assert after[-1] == "demo: the job ended with exit code 130\n"
    left = [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])]
    assert [words for words in left if words and str(tmp_path) in words] == []


def until_stepping(lines: Iterator[str], out: Path) -> Iterator[str]:
    """The lines up to the first after the job has begun to train."""
    for line in lines:
        yield line
        if (out / "metrics.jsonl").exists():
            return
