"""Run the cases of trainer_cases.py with transformers' Trainer, and write what came out:
trainer_worker.py FOLDER.

Each rank of a job runs all of it; rank 0 writes FOLDER/results.json, and each case's weights below FOLDER.
What Trainer needs on a machine without a GPU, whatever `deepspeed` is, stands in
docs/libraries/hugging-face.md.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers.training_args
from accelerate import PartialState
from small_training import (
    EPSILON,
    EVAL,
    LR,
    RANK,
    TRAIN,
    VOCAB,
    WARMUP,
    WORLD,
    MasterAdamW,
    loss_of_saved,
    make_qwen,
    tidy_up,
    warmup_factor,
)
from trainer_cases import CASES, NUM_STEPS, SAVED_STEP, WANTED, Case, with_references
from transformers import (
    GenerationConfig,
    Qwen2ForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

# Without a GPU Trainer says that bf16 needs one.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True

Result = dict[str, Any]


class Losses(TrainerCallback):
    """Every step's numbers."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float | None]] = []
        self.evaluations: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.steps.append((float(logs["loss"]), logs.get("grad_norm")))
        if "eval_loss" in logs:
            self.evaluations.append(float(logs["eval_loss"]))


def size_of_tp(case: Case) -> int:
    """Over how many ranks layers are divided."""
    return min(case.tp, WORLD)


def ds_config(case: Case) -> dict[str, Any]:
    """The ds_config of the case, with "auto" wherever Trainer takes it."""
    zero: dict[str, Any] = {
        "stage": case.stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    for what in case.offload:
        zero[f"offload_{what}"] = {"device": "cpu", "pin_memory": False}
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        "zero_optimization": zero,
    }
    if case.reentrant is not None:
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
        config["data_types"] = {"param_dtype": "fp32", "keep_in_fp32_modules": []}
        config |= {"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True}
    if size_of_tp(case) > 1:
        config["tensor_parallel"] = {"autotp_size": size_of_tp(case)}
    if case.ds_optimizer:
        params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        config["optimizer"] = {"type": "AdamW", "params": params}
    if case.ds_scheduler:
        params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    return config


def make_arguments(
    case: Case, folder: Path, kind: type[TrainingArguments] = TrainingArguments, **more: Any
) -> Any:
    """TrainingArguments of one case: made before the model, as zero.Init wants it."""
    if case.stage is None:
        place: dict[str, Any] = {"use_cpu": True, "ddp_backend": "gloo" if WORLD > 1 else None}
    else:
        given: Any = ds_config(case)
        if case.is_file:
            path = folder.with_suffix(".json")
            if RANK == 0:
                path.write_text(json.dumps(given))
            given = str(path)
        place = {"deepspeed": given, "bf16": case.bf16, "fp16": case.fp16}
        if WORLD > 1:  # without a GPU accelerate would take each rank for a job of its own
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo").wait_for_everyone()
            place["accelerator_config"] = {"use_configured_state": True}
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2 * size_of_tp(case),  # a step has as many samples in any case
        "per_device_eval_batch_size": 2 * size_of_tp(case),  # so that no rank gets a sample twice
        "gradient_accumulation_steps": 2,
        "max_steps": NUM_STEPS,
        "learning_rate": LR,
        "adam_epsilon": EPSILON,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": WARMUP,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_on_each_node": case.is_resumed,  # on one host the files are where they are without it
    }
    if case.reentrant is not None:
        options["gradient_checkpointing"] = True
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": case.reentrant}
    return kind(str(folder), **place, **{**options, **more})


def make_model(case: Case, folder: Path) -> Any:
    """The same small model every time, or the one that `from_pretrained` finds in the folder."""
    if case.is_loaded:
        return Qwen2ForCausalLM.from_pretrained(folder / f"start{RANK}", dtype=torch.float32)
    return make_qwen()


def plain_optimizers(case: Case, model: Any, trainer: Trainer) -> None:
    """Give Trainer on plain torch the optimizer and schedule that the ds_config names,
    where that differs from its own.
    """
    options = {"lr": LR, "eps": EPSILON, "weight_decay": 0.1}
    kind = MasterAdamW if case.bf16 else torch.optim.AdamW
    if case.ds_optimizer:
        trainer.optimizer = kind(model.parameters(), **options)
    elif case.bf16:
        decayed = set(trainer.get_decay_parameter_names(model))
        named = dict(model.named_parameters())
        trainer.optimizer = kind(
            [
                {"params": [p for name, p in named.items() if name in decayed], "weight_decay": 0.1},
                {"params": [p for name, p in named.items() if name not in decayed], "weight_decay": 0.0},
            ],
            **options,
        )
    if case.ds_scheduler:
        trainer.create_optimizer()
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, warmup_factor)


def make_trainer(case: Case, folder: Path, **more: Any) -> tuple[Trainer, Losses]:
    args = make_arguments(case, folder / case.name, **more)
    model = make_model(case, folder)
    if case.bf16 and case.stage is None:
        model.to(torch.bfloat16)
    losses = Losses()
    trainer = Trainer(model, args, train_dataset=TRAIN, eval_dataset=EVAL, callbacks=[losses])
    if case.stage is None:
        plain_optimizers(case, model, trainer)
    return trainer, losses


def train(case: Case, folder: Path, environ: dict[str, str]) -> Result:
    """Train, save a checkpoint on the way and the model at the end; load both again."""
    saving = {"save_strategy": "steps", "save_steps": SAVED_STEP} if case.is_resumed else {}
    trainer, losses = make_trainer(case, folder, **saving)
    trainer.train()
    last = trainer.evaluate()["eval_loss"]
    saved = folder / case.name / "model"
    trainer.save_model(str(saved))
    tidy_up(environ, trainer.accelerator)
    result: Result = {"steps": losses.steps, "evaluations": losses.evaluations, "last": last}
    if case.reentrant is not None:
        from dslaunch.runtime.activation.checkpointing import _PROCESS

        assert _PROCESS.inputs.num_sent > 0, "no input of a block has waited in host memory"

    if case.is_resumed:
        again, resumed = make_trainer(case, folder)
        again.train(resume_from_checkpoint=str(folder / case.name / f"checkpoint-{SAVED_STEP}"))
        result["resumed"] = resumed.steps
        tidy_up(environ, again.accelerator)
    if RANK == 0:  # which has written it
        result["loaded"] = loss_of_saved(saved)
    return result


def keep_best(stage: int | None, folder: Path, environ: dict[str, str]) -> Result:
    """Train with the first of three evaluations the best one; the model must be that one's again."""
    case = Case(stage=stage, ds_optimizer=False, ds_scheduler=False)
    more = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True}
    trainer, losses = make_trainer(
        case, folder / "best", **more, metric_for_best_model="eval_loss", greater_is_better=True
    )
    trainer.train()
    best = str(trainer.state.best_model_checkpoint)
    last = trainer.evaluate()["eval_loss"]
    tidy_up(environ, trainer.accelerator)
    return {"best": Path(best).name, "evaluations": losses.evaluations, "last": last}


def only_evaluate(stage: int | None, folder: Path, environ: dict[str, str]) -> Result:
    """Evaluate and predict with an engine that has no optimizer."""
    trainer, _ = make_trainer(Case(stage=stage, ds_scheduler=False), folder / "only")
    before = trainer.evaluate()["eval_loss"]
    logits = trainer.predict(EVAL).predictions
    tidy_up(environ, trainer.accelerator)
    return {"before": before, "logits": logits.ravel()[::97].tolist()}


def generate(stage: int | None, folder: Path, environ: dict[str, str]) -> Result:
    """Train an encoder and decoder for a few steps, generate in the evaluation and by hand,
    greedy and with beams.
    """
    case = Case(stage=stage, ds_scheduler=False)
    place = folder / f"generate-{stage}"
    args = make_arguments(
        case,
        place,
        Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_config=GenerationConfig(
            max_new_tokens=9,
            min_new_tokens=3,
            num_beams=2,
            decoder_start_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
        ),
    )
    set_seed(1)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    trainer = Seq2SeqTrainer(model, args, train_dataset=TRAIN, eval_dataset=EVAL)
    if stage is None:
        plain_optimizers(case, model, trainer)
    trainer.train()
    predicted = trainer.predict(EVAL).predictions
    ids = torch.stack(
        [EVAL[RANK + i]["input_ids"] for i in range(2 + RANK)]
    )  # ranks stop at different lengths
    options = {"decoder_start_token_id": 0, "eos_token_id": list(range(1, 20 + 20 * RANK)), "pad_token_id": 0}
    model.eval()
    by_hand = model.generate(ids, max_new_tokens=12, do_sample=False, **options)
    tidy_up(environ, trainer.accelerator)
    return {"predicted": predicted.tolist(), "by_hand": by_hand.tolist()}


def add_tokens(stage: int | None, folder: Path, environ: dict[str, str]) -> Result:
    """Train a model that is loaded and then gets more tokens, its two embeddings tied and not;
    load what it saves.
    """
    result: Result = {}
    for is_tied in (True, False):
        name = "tied" if is_tied else "untied"
        case = Case(stage=stage, ds_optimizer=False, ds_scheduler=False)
        saved = folder / f"tokens-{name}-{stage}"
        args = make_arguments(case, saved, eval_strategy="no")
        start = folder / f"{'start' if is_tied else 'untied'}{RANK}"
        model = Qwen2ForCausalLM.from_pretrained(start, dtype=torch.float32)
        set_seed(2)
        model.resize_token_embeddings(VOCAB + 7)
        losses = Losses()
        trainer = Trainer(model, args, train_dataset=TRAIN, callbacks=[losses])
        trainer.train()
        trainer.save_model(str(saved / "model"))
        tidy_up(environ, trainer.accelerator)
        again = Qwen2ForCausalLM.from_pretrained(saved / "model", dtype=torch.float32) if RANK == 0 else None
        result[name] = {
            "steps": losses.steps,
            "weights": again
            and [again.lm_head.weight.ravel().tolist(), again.model.embed_tokens.weight.ravel().tolist()],
            "is_tied": again and again.lm_head.weight is again.model.embed_tokens.weight,
            "loaded": again and loss_of_saved(saved / "model"),
        }
    return result


EXTRAS: tuple[tuple[Any, tuple[int, ...]], ...] = (  # each on plain torch, too
    (keep_best, (1, 2, 3)),
    (only_evaluate, (3,)),
    (generate, (2, 3)),
    (add_tokens, (3,)),
)


def main() -> None:
    folder, results = Path(sys.argv[-1]), {}  # a launcher puts --local_rank before it
    environ = dict(os.environ)
    gc.freeze()  # the libraries' own objects are many, and accelerate collects garbage twice a case
    make_qwen().save_pretrained(folder / f"start{RANK}")
    make_qwen(is_tied=False).save_pretrained(folder / f"untied{RANK}")
    names = json.loads((folder / WANTED).read_text())
    for case in with_references([case for case in CASES if case.name in names]):
        begin = time.perf_counter()
        results[case.name] = train(case, folder, environ)
        results[case.name]["seconds"] = time.perf_counter() - begin
    for run, every_stage in EXTRAS:
        stages = [stage for stage in every_stage if f"{run.__name__}-{stage}" in names]
        for stage in (None, *stages) if stages else ():
            begin = time.perf_counter()
            result = run(stage, folder, environ)
            results[f"{run.__name__}-{stage}"] = {**result, "seconds": time.perf_counter() - begin}
    if RANK == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
