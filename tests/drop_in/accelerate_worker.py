"""Run the cases of accelerate_cases.py with Accelerator in loops of our own, and write what came out:
accelerate_worker.py FOLDER.

`accelerate launch --use_deepspeed` starts it. Each rank runs all of it; rank 0 writes FOLDER/results.json,
and below it what the cases save. What accelerate needs on a machine without a GPU, whatever `deepspeed` is,
stands in docs/libraries/hugging-face.md.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from accelerate_cases import CASES, NUM_STEPS, REFERENCES, SAVED_STEP, WANTED, Case
from small_training import (
    EPSILON,
    EVAL,
    LR,
    RANK,
    TRAIN,
    WARMUP,
    WORLD,
    MasterAdamW,
    loss_of_saved,
    make_qwen,
    tidy_up,
    warmup_factor,
)

DECAY, CLIP, ACCUMULATED, MICRO_BATCH = 0.1, 0.5, 2, 2
Result = dict[str, Any]


def ds_config(case: Case) -> dict[str, Any]:
    """The ds_config for DummyOptim and DummyScheduler."""
    options = {"lr": "auto", "betas": [0.9, 0.999], "eps": EPSILON, "weight_decay": "auto"}
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": case.stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {"type": "AdamW", "params": options},
    }
    if case.way == "dummy":
        config["scheduler"] = {"type": "WarmupLR", "params": warmup}
    return config


def make_accelerator(case: Case) -> Accelerator:
    precision = "bf16" if case.bf16 else "no"
    if case.stage is None:
        return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    gloo = [
        InitProcessGroupKwargs(backend="gloo")
    ]  # without a GPU accelerate would not ask for a group at all
    if case.is_launched:
        return Accelerator(kwargs_handlers=gloo)
    if case.way in ("dummy", "callable"):
        plugin = DeepSpeedPlugin(hf_ds_config=ds_config(case))
    else:
        plugin = DeepSpeedPlugin(
            zero_stage=case.stage,
            gradient_accumulation_steps=ACCUMULATED,
            gradient_clipping=CLIP,
            offload_optimizer_device="cpu" if case.is_offloaded else "none",
            zero3_save_16bit_model=True,
        )
    return Accelerator(deepspeed_plugin=plugin, mixed_precision=precision, kwargs_handlers=gloo)


def make_optimizer(case: Case, model: Any) -> tuple[Any, Any]:
    """The optimizer and the schedule that are given to prepare()."""
    params: Any = list(model.parameters())
    if case.way in ("client", "callable"):
        params = [{"params": params[::2]}, {"params": params[1::2], "lr": LR / 2}]
    if case.way in ("dummy", "callable"):
        optimizer = DummyOptim(params, lr=LR, weight_decay=DECAY)
        if case.way == "dummy":
            return optimizer, DummyScheduler(optimizer, warmup_num_steps=WARMUP)
        return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=lambda made: linear(made, 1))
    kind = MasterAdamW if case.bf16 and case.stage is None else torch.optim.AdamW
    optimizer = kind(params, lr=LR, eps=EPSILON, weight_decay=DECAY)
    if case.way == "client":
        # accelerate steps a schedule of torch's once for each rank
        return optimizer, linear(optimizer, WORLD)
    if case.stage is None:
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_factor(t / WORLD))
    from deepspeed.runtime.lr_schedules import WarmupLR

    return optimizer, WarmupLR(optimizer, warmup_max_lr=LR, warmup_num_steps=WARMUP)


def linear(optimizer: Any, steps_at_once: int) -> Any:
    last = (NUM_STEPS + 1) * steps_at_once
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / last)


class Run:
    """One Accelerator with what it has prepared."""

    def __init__(self, case: Case) -> None:
        self.accelerator = make_accelerator(case)
        set_seed(0)
        model = make_qwen()
        if case.bf16 and case.stage is None:
            model.to(torch.bfloat16)
        optimizer, scheduler = make_optimizer(case, model)
        data = torch.utils.data.ConcatDataset([TRAIN, TRAIN])
        loader = torch.utils.data.DataLoader(data, batch_size=MICRO_BATCH)
        evaluated = torch.utils.data.DataLoader(EVAL, batch_size=MICRO_BATCH)
        self.model, self.optimizer, self.scheduler, self.loader, self.evaluated = self.accelerator.prepare(
            model, optimizer, scheduler, loader, evaluated
        )
        self.step = 0

    def train(self, until: int) -> list[tuple[float, float, float]]:
        """Every step's loss over all ranks and gradient norm, and the learning rate that it
        leaves for the next.
        """
        accelerator, steps, losses = self.accelerator, [], []
        batches = skip_first_batches(self.loader, self.step * ACCUMULATED)
        self.model.train()
        for batch in batches:
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                losses.append(accelerator.gather(loss.detach()).float().mean().item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps.append((sum(losses) / len(losses), float(norm), self.optimizer.param_groups[0]["lr"]))
                losses, self.step = [], self.step + 1
                if self.step == until:
                    return steps
        raise AssertionError("too few batches")

    def evaluate(self) -> float:
        self.model.eval()
        losses = []
        with torch.no_grad():
            for batch in self.evaluated:
                losses.append(
                    self.accelerator.gather_for_metrics(self.model(**batch).loss.repeat(MICRO_BATCH))
                )
        return float(torch.cat(losses).mean())


def run_case(case: Case, folder: Path, environ: dict[str, str]) -> Result:
    """Train, save the states on the way and the weights at the end; go on from the states with an
    accelerator of its own.
    """
    place = folder / case.name
    run = Run(case)
    steps = run.train(SAVED_STEP)
    if case.is_resumed:
        run.accelerator.save_state(str(place / "state"))
    steps += run.train(NUM_STEPS)
    last = run.evaluate()
    whole = run.accelerator.get_state_dict(run.model)
    plain = run.accelerator.unwrap_model(run.model)
    plain.save_pretrained(
        place / "model",
        is_main_process=run.accelerator.is_main_process,
        save_function=run.accelerator.save,
        state_dict=whole,
    )
    if case.way == "dummy":
        run.accelerator.save_model(run.model, str(place / "bare"))
    run.accelerator.wait_for_everyone()
    result: Result = {"steps": steps, "last": last, "plain": type(plain).__name__}
    tidy_up(environ, run.accelerator)
    if case.is_resumed:
        again = Run(case)
        again.accelerator.load_state(str(place / "state"))
        again.step = SAVED_STEP
        result["resumed"] = again.train(NUM_STEPS)
        tidy_up(environ, again.accelerator)
    if RANK == 0:  # which has written it
        result["loaded"] = loss_of_saved(place / "model")
    return result


def skip_step(stage: int | None, folder: Path, environ: dict[str, str]) -> Result:
    """A step whose gradients are infinite: the optimizer and the schedule must stand still,
    and accelerate must know.
    """
    run = Run(Case(stage=stage))
    before = run.scheduler.get_last_lr()
    batch = next(iter(run.loader))
    skipped = []
    for factor in (math.inf, 1.0):
        for _ in range(ACCUMULATED):
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(run.model(**batch).loss * factor)
                run.optimizer.step()
                run.scheduler.step()
        skipped.append((run.accelerator.optimizer_step_was_skipped, run.scheduler.get_last_lr() == before))
    tidy_up(environ, run.accelerator)
    return {"skipped": skipped}


def main() -> None:
    folder, results = Path(sys.argv[-1]), {}
    launched = dict(os.environ)
    environ = {name: value for name, value in launched.items() if not name.startswith("ACCELERATE_")}
    gc.freeze()  # the libraries' own objects are many, and accelerate collects garbage twice a case
    names = json.loads((folder / WANTED).read_text())
    cases = [case for case in CASES if case.name in names]
    for case in (*REFERENCES, *cases):
        begin = time.perf_counter()
        start_from = launched if case.is_launched else environ
        os.environ.clear()
        os.environ.update(start_from)
        results[case.name] = run_case(case, folder, start_from)
        results[case.name]["seconds"] = time.perf_counter() - begin
    os.environ.clear()
    os.environ.update(environ)
    results["skip_step"] = skip_step(2, folder, environ)
    if RANK == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
