"""Programs that `import deepspeed` are compared with plain torch as they are: nothing is found in them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launcher.local_job import Job

HERE = Path(__file__).parent / "programs"
TWO_RUNS_S = 500.0  # transformers is imported in both, on a machine that may be busy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}

# Name -> the number of ranks, and the words after `dslaunch numerics`; FILE and DIR are of the test.
PROGRAMS = {
    "Trainer": (2, "trainer.py --stage 2"),
    "Trainer in bf16": (2, "trainer.py --stage 3 --bf16"),
    "Trainer with adapters": (2, "trainer.py --stage 3 --lora"),
    "tensor parallelism with an mpu": (2, "autotp.py --tp_size 2 DIR"),
    "tensor parallelism by rules": (4, "autotp.py --tp_size 2 --rules --zero_stage 2 DIR"),
    "Accelerate with sequences over ranks": (2, "--no_local_rank ulysses.py FILE 3"),
    "images": (2, "cifar.py --stage 2"),
    "experts": (2, "cifar.py --moe --ep-world-size 2 --num-experts 4"),
    "stages": (2, "alexnet.py --deepspeed_config ds_config.json"),
    "adapters of a program's own": (2, "chat_sft.py DIR --zero_stage 3 --lora_dim 4"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_found_in_a_sound_program(tmp_path: Path, name: str) -> None:
    num_ranks, words = PROGRAMS[name]
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    places = {"FILE": str(tmp_path / "found.json"), "DIR": str(tmp_path / "folder")}
    given = [str(HERE / word) if word.endswith(".py") else places.get(word, word) for word in words.split()]
    modules = "--preload=torch,transformers.trainer"
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    job = Job(tmp_path, ["numerics", f"--num_gpus={num_ranks}", modules, "--drop_in=always", *given], env=env)
    assert job.wait(TWO_RUNS_S) == 0, job.out + job.err
    assert job.out.splitlines()[-1].startswith("equal: 3 steps of ")
