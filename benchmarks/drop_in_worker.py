"""One rank of bench_drop_in.py: a program that imports deepspeed, and gets the one that is
first on PYTHONPATH.

python drop_in_worker.py SCRIPT STAGE PRECISION [offload]      SCRIPT: engine | trainer

Rank 0 prints one line of JSON. The variable BEGUN says when its process was started.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 20
WARM = 5  # steps that are not timed
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}


def config_of(stage: int, precision: str, is_offloaded: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if is_offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}},
    }


def by_engine(config: dict[str, Any]) -> dict[str, Any]:
    """Train in a loop of its own, as in DeepSpeed's tutorials."""
    import deepspeed  # type: ignore[import-not-found]
    import torch

    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from benchmarks.models import VOCABULARY, Gpt, Shape

    torch.manual_seed(0)
    model = Gpt(Shape(width=256, blocks=4, batch=2, sequence=64))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ready_at = time.monotonic()
    losses, times = [], []
    for step in range(STEPS):
        began = time.perf_counter()
        for micro in range(2):
            seed = (step * 2 + micro) * WORLD + RANK
            tokens = torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(seed))
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        times.append(time.perf_counter() - began)
    return {
        "version": deepspeed.__version__,
        "losses": losses,
        "times": times,
        "ready_at": ready_at,
    }


def by_trainer(config: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face's Trainer, with the workarounds that it needs on CPUs with any DeepSpeed."""
    import tempfile

    import torch
    import transformers
    import transformers.training_args

    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined]
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    transformers.set_seed(0)

    class Times(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.ready_at, self.began, self.times = 0.0, 0.0, []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.ready_at = self.ready_at or time.monotonic()
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter() - self.began)

    class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4 * STEPS * WORLD

        def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(512, (64,), generator=torch.Generator().manual_seed(place))
            return {"input_ids": tokens, "labels": tokens}

    seen = Times()
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=STEPS,
                logging_steps=1,
                learning_rate=1e-3,
                adam_beta2=0.95,
                weight_decay=0.01,
                warmup_steps=4,
                save_strategy="no",
                report_to=[],
                bf16=config["bf16"]["enabled"],
                dataloader_pin_memory=False,
                disable_tqdm=True,
                deepspeed={
                    **config,
                    "scheduler": {"type": "WarmupLR", "params": config["scheduler"]["params"]},
                },
                ddp_backend="gloo",
            ),
            train_dataset=Tokens(),
            callbacks=[seen],
        )
        trainer.train()
    import deepspeed

    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return {
        "version": deepspeed.__version__,
        "losses": losses,
        "times": seen.times,
        "ready_at": seen.ready_at,
    }


def main() -> None:
    script, stage, precision, *more = sys.argv[1:]
    config = config_of(int(stage), precision, "offload" in more)
    found = {"engine": by_engine, "trainer": by_trainer}[script](config)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if RANK == 0:
        answer = {
            "version": found["version"],
            "losses": found["losses"],
            "step_s": statistics.median(found["times"][WARM:]),
            "start_s": found["ready_at"] - float(os.environ["BEGUN"]),
            "peak_bytes": peak,
        }
        print(f"\n{json.dumps(answer)}", flush=True)
    os._exit(0)  # gloo's threads end some processes with SIGABRT; the answer is here


if __name__ == "__main__":
    main()
