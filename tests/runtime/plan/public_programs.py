"""Training programs of public repositories, planned as they stand: what `dslaunch plan` answers to each.

`PUBLIC_SOURCES=FOLDER python -m tests.runtime.plan.public_programs [WORD ...]` plans those whose checkouts
are in the folder, as OWNER/NAME; with --publish the answers are a table of docs/reference/plan-accuracy.md.
Nothing of the programs is in this project. Models, tokenizers and data that they would download are small
ones made here, in the folder that they run in, under the names that they ask for. PUBLIC_PACKAGES is a folder
of packages that some import.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.guide_section import CHECKOUT, replace_section, table
from tests.runtime.plan.public_models import PUBLIC_SOURCES, commit_of, folder_of

PAGE = CHECKOUT / "docs" / "reference" / "plan-accuracy.md"
COMMAND = "python -m tests.runtime.plan.public_programs"
LIMIT_S = 300
HOSTS = ("-H", "node1:4", "--gpu", "A100-80")
EXAMPLES = "deepspeedai/DeepSpeedExamples"
LLAMA, NEOX, ALPACA = "llama", "neox", "tatsu-lab/alpaca"  # folders of the material
ENWIK8_BYTES = 95_000_000
_ALPACA_ROWS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicProgram:
    """A program of a repository, its words, and what is in its environment."""

    repository: str
    file: str
    words: str = ""
    options: str = ""  # of dslaunch
    env: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Return where it is."""
        return folder_of(self.repository) / self.file


def ds_config(stage: int, **more: Any) -> dict[str, Any]:
    """Return a ds_config for programs that bring none."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": stage},
        **more,
    }


_TP = f"--model_name {LLAMA} --tp_size 2 --dp_size 2 --zero_stage 2 --seq_length 64"
_ACCELERATE = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{root}/examples/deepspeed_config_templates/zero_stage3_config.json",
    "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
}
_SFT = (
    f"--model_name_or_path {LLAMA} --output_dir out --bf16 True --deepspeed ds_trainer.json --report_to none "
    "--per_device_train_batch_size 2 --max_length 64"
)
PUBLIC_PROGRAMS = (
    PublicProgram(
        repository=EXAMPLES,
        file="training/bf16_master_weight/train.py",
        words="--deepspeed_config ds_stage3.json --num_layers 4 --hidden_dim 256 --num_heads 4",
    ),
    PublicProgram(repository=EXAMPLES, file="training/offload_states/offload_states.py", words="--nlayers 4"),
    PublicProgram(
        repository=EXAMPLES, file="training/tensor_parallel/basic_example/autotp_example.py", words=_TP
    ),
    PublicProgram(
        repository=EXAMPLES,
        file="training/tensor_parallel/custom_patterns/autotp_custom_patterns.py",
        words=_TP.replace(LLAMA, NEOX),
    ),
    PublicProgram(
        repository=EXAMPLES,
        file="training/tensor_parallel/hf_integration/train.py",
        words=f"--model_name_or_path {LLAMA} --data_path alpaca.json --bf16 True --output_dir out "
        "--per_device_train_batch_size 8 --deepspeed ds_tp.json --report_to none",
    ),
    PublicProgram(
        repository=EXAMPLES,
        file="training/DeepSpeed-ZenFlow/benchmark/zf_benchmark.py",
        words="--pin_memory_opts 1 --topk_ratios 0.1 --update_intervals 2 --overlap_steps 1",
    ),
    PublicProgram(
        repository=EXAMPLES,
        file="training/DeepSpeed-ZenFlow/finetuning/finetune_llama.py",
        words=f"--model_name {LLAMA} --lr 1e-5 --batch_size 2 --output_dir out "
        "--deepspeed_config ds_stage3.json",
    ),
    PublicProgram(
        repository=EXAMPLES,
        file="training/DeepSpeed-SuperOffload/finetune_zero3.py",
        words=f"--model_name {LLAMA} --lr 1e-5 --batch_size 2 --output_dir out --max_length 64 "
        "--attn_implementation sdpa --deepspeed_config ds_offload.json",
    ),
    PublicProgram(
        repository=EXAMPLES,
        file="training/data_efficiency/variable_batch_size_and_lr/variable_batch_size_and_lr_example.py",
        options="--no_local_rank",
    ),
    PublicProgram(
        repository="huggingface/accelerate",
        file="examples/by_feature/deepspeed_with_config_support.py",
        words=f"--train_file lines.txt --model_name_or_path {LLAMA} --block_size 64 --output_dir out "
        "--per_device_train_batch_size 2",
        options="--no_local_rank",
        env=_ACCELERATE,
    ),
    PublicProgram(
        repository="huggingface/peft",
        file="examples/sft/train.py",
        words=f"{_SFT} --dataset_name texts --dataset_text_field text --use_peft_lora True --lora_r 8",
    ),
    PublicProgram(
        repository="huggingface/trl",
        file="trl/scripts/sft.py",
        words=f"{_SFT} --dataset_name texts",
    ),
    PublicProgram(
        repository="lucidrains/linear-attention-transformer",
        file="examples/enwik8_deepspeed/train.py",
        words="--deepspeed --deepspeed_config {folder}/ds_config.json",
        env={"PYTHONPATH": "{root}"},
    ),
    PublicProgram(
        repository="lucidrains/reformer-pytorch",
        file="examples/enwik8_deepspeed/train.py",
        words="--deepspeed --deepspeed_config {folder}/ds_config.json",
        env={"PYTHONPATH": "{root}"},
    ),
)


def make_material(folder: Path) -> None:
    """Write a small model, its tokenizer, texts and ds_configs, under the names that programs ask for."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
    )

    from tests.docs.test_examples import make_base_with_tokenizer

    line = "the quick brown fox jumps over the lazy dog"
    make_base_with_tokenizer(folder / LLAMA, f"{line}\n" * 32)
    sizes = AutoConfig.from_pretrained(folder / LLAMA)
    sizes.num_key_value_heads = sizes.num_attention_heads  # as many as ranks that divide a layer
    AutoModelForCausalLM.from_config(sizes).save_pretrained(folder / LLAMA)
    neox = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = GPTNeoXForCausalLM(GPTNeoXConfig(**neox, vocab_size=sizes.vocab_size))
    made.save_pretrained(folder / NEOX)
    AutoTokenizer.from_pretrained(folder / LLAMA).save_pretrained(folder / NEOX)
    (folder / "lines.txt").write_text(f"{line} {line} {line}\n" * 2000)
    rows = [{"instruction": line, "input": "", "output": line} for _ in range(_ALPACA_ROWS)]
    _write(folder / "alpaca.json", rows)
    _write(folder / ALPACA / "train.json", rows)
    texts = [{"text": f"{line} {line}"} for _ in range(_ALPACA_ROWS)]
    for split in ("train", "test"):
        _write(folder / "texts" / f"{split}.json", texts)
    _write(folder / "ds_stage3.json", ds_config(3))
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    _write(folder / "ds_offload.json", {**ds_config(3), "zero_optimization": offload})
    auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    _write(
        folder / "ds_trainer.json", {**auto, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
    )
    tensor = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 4}}
    _write(folder / "ds_tp.json", {**auto, "bf16": {"enabled": "auto"}, **tensor})


def _make_enwik8(folder: Path) -> None:
    import gzip

    path = folder / "data" / "enwik8.gz"
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(bytes(range(32, 127)) * (ENWIK8_BYTES // 95))


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def answer(program: PublicProgram, folder: Path) -> tuple[bool, str]:
    """Return whether it was planned, and the first line or what was said instead."""
    words = program.words.format(folder=program.path.parent).split()
    root = folder_of(program.repository)
    given = {name: value.format(root=root) for name, value in program.env.items()}
    more = os.environ.get("PUBLIC_PACKAGES", "")
    given["PYTHONPATH"] = os.pathsep.join(filter(None, (given.get("PYTHONPATH", ""), more)))
    if "enwik8" in program.file:
        _make_enwik8(folder)
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "dslaunch"),
            "plan",
            *HOSTS,
            f"--time_limit={LIMIT_S}",
            *program.options.split(),
            str(program.path),
            *words,
        ],
        cwd=folder,
        env={**os.environ, **given, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )
    if done.returncode in (0, 1):
        return True, done.stdout.splitlines()[0]
    said = done.stderr.strip().splitlines()
    return False, said[-1] if said else f"exit code {done.returncode}"


def _rows(words: list[str]) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_material(folder)
        for program in PUBLIC_PROGRAMS:
            if not program.path.exists() or (words and not any(word in str(program.path) for word in words)):
                continue
            is_planned, said = answer(program, folder)
            said = said.replace(str(folder_of(program.repository)) + "/", "").replace("|", "\\|")
            name = f"{program.repository} {commit_of(program.repository)}"
            yield [name, program.file, "yes" if is_planned else "no", said]


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--publish", action="store_true", help=f"write the table into {PAGE.name}")
    given = parser.parse_args()
    if PUBLIC_SOURCES not in os.environ:
        raise SystemExit(f"{PUBLIC_SOURCES} names no folder with checkouts as karpathy/nanoGPT")
    rows = []
    for row in _rows(given.words):
        print(*row, flush=True)
        rows.append(row)
    day = datetime.datetime.now(tz=datetime.timezone.utc).date()
    num = sum(row[2] == "yes" for row in rows)
    head = ["repository", "program", "planned", "answer"]
    text = f"Planned on {day}: {num} of {len(rows)}.\n\n{table(head, rows)}"
    if given.publish:
        replace_section(PAGE, COMMAND, text)


if __name__ == "__main__":
    main()
