"""Trains with Lightning in many ways, one after the other; test_lightning.py compares.

Arguments: folder, cases.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.fabric.strategies.ddp as fabric_ddp
import lightning.fabric.strategies.deepspeed as fabric_deepspeed
import lightning.pytorch as pl
import lightning.pytorch.strategies.deepspeed as pl_deepspeed
import torch
from cases import main, world_size
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary
from tiny import STEPS, config, numbers
from torch import Tensor
from transformers import AutoModelForCausalLM

ACCUMULATED, CLIP = 2, 0.05
FREE = {"gradient_clip_val": 1e3}  # above every norm


def _any_device(parallel_devices: list[torch.device]) -> None:
    """Instead of Lightning's look at the places of GPUs: CPUs have none."""


pl_deepspeed._validate_device_index_selection = _any_device
fabric_deepspeed._validate_device_index_selection = _any_device


class CpuDeepSpeedStrategy(DeepSpeedStrategy):
    """Without Lightning's check that there is a GPU. The rest is Lightning's."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()


class CpuFabricStrategy(fabric_deepspeed.DeepSpeedStrategy):
    """Likewise."""

    def setup_environment(self) -> None:
        super(fabric_deepspeed.DeepSpeedStrategy, self).setup_environment()


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> Tensor:
        generator = torch.Generator().manual_seed(place)
        return torch.randint(4, config("llama").vocab_size, (12,), generator=generator)


class Module(pl.LightningModule):
    """A tiny Llama. `is_late`: it is made in configure_model, where a strategy can shard it. `share`:
    what Lightning gets of each loss.
    """

    def __init__(self, *, is_late: bool = False, share: float = 1.0) -> None:
        super().__init__()
        self.share = share
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.is_late = is_late
        self.was_sharded = False
        self.model: Any = None if is_late else self._make()

    def _make(self) -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config("llama"))

    def configure_model(self) -> None:
        if self.is_late and self.model is None:
            self.model = self._make()
            self.was_sharded = all(hasattr(param, "ds_id") for param in self.model.parameters())

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss * self.share

    def validation_step(self, batch: Tensor) -> None:
        self.evaluated.append(self.model(input_ids=batch, labels=batch).loss.item())

    test_step = validation_step

    def predict_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(first: int = 0) -> Any:
    rows = torch.utils.data.Subset(Rows(), range(first, 64))
    return torch.utils.data.DataLoader(rows, batch_size=2)


def trainer(folder: Path, stage: int | None, **more: Any) -> pl.Trainer:
    strategy: ParallelStrategy
    if stage is None:
        strategy = DDPStrategy(process_group_backend="gloo")
    else:
        strategy = CpuDeepSpeedStrategy(
            stage=stage, process_group_backend="gloo", logging_batch_size_per_gpu=2
        )
    return pl.Trainer(
        **{
            "default_root_dir": folder,
            "accelerator": "cpu",
            "devices": world_size(),
            "strategy": strategy,
            "precision": "32-true",
            "max_steps": STEPS,
            "accumulate_grad_batches": ACCUMULATED,
            "gradient_clip_val": CLIP,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "logger": False,
            **more,
        }
    )


class SaveHalf(pl.Callback):
    """A checkpoint after half of the steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == STEPS * ACCUMULATED // 2 and trainer.global_step == STEPS // 2:
            trainer.save_checkpoint(self.path)


def fit(
    folder: Path,
    *,
    name: str,
    stage: int | None,
    is_late: bool = False,
    resumes: str | None = None,
    share: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    pl.seed_everything(0)
    path = folder / name
    module = Module(is_late=is_late, share=share)
    runs = trainer(path, stage, callbacks=[SaveHalf(path / "half.ckpt")], **more)
    last = folder / resumes / "half.ckpt" if resumes else None
    runs.fit(module, loader(), ckpt_path=last)
    runs.save_checkpoint(path / "end.ckpt")
    result = {"losses": module.losses, "was_sharded": module.was_sharded, "global_step": runs.global_step}
    result["lr"] = [float(group["lr"]) for group in runs.optimizers[0].param_groups]
    if stage is not None:
        result["clip"] = runs.strategy.model.gradient_clipping()
    runs.strategy.barrier()
    if stage is None:
        state = torch.load(path / "end.ckpt", weights_only=False)["state_dict"]
    else:
        whole = path / f"whole{runs.global_rank}.ckpt"
        converted = convert_zero_checkpoint_to_fp32_state_dict(path / "end.ckpt", whole)
        state = torch.load(whole, weights_only=False)["state_dict"]
        result["kept"] = sorted(set(converted) - {"state_dict"})
    again = Module()
    again.load_state_dict(state)
    result["weights"] = numbers(state)
    return result


def validate(folder: Path, *, stage: int | None, trained: str) -> dict[str, Any]:
    """Evaluate a checkpoint, with an engine that has no optimizer."""
    module = Module(is_late=stage == 3)
    runs = trainer(folder, stage, limit_val_batches=2)
    runs.validate(module, loader(32), ckpt_path=folder / trained / "end.ckpt", verbose=False)
    return {"losses": module.evaluated}


def one_after_the_other(folder: Path, *, stage: int | None) -> dict[str, Any]:
    """All that one Trainer does with one module; nothing of it destroys an engine."""
    pl.seed_everything(0)
    module = Module()
    runs = trainer(folder / f"in turn {stage}", stage, limit_val_batches=2, limit_test_batches=2)
    if stage == 3:
        runs.strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    runs.fit(module, loader())
    runs.validate(module, loader(32), verbose=False)
    runs.test(module, loader(32), verbose=False)
    predicted = runs.predict(module, loader(56))
    runs.fit_loop.epoch_loop.max_steps = 2 * STEPS
    runs.fit(module, loader())
    found = (module.losses, module.evaluated, [float(one) for one in predicted or ()])
    return {"losses": [loss for losses in found for loss in losses], "counts": [len(one) for one in found]}


def fabric(folder: Path, *, stage: int | None) -> dict[str, Any]:
    """The same training as a loop of one's own, with a checkpoint in its middle that the
    next steps begin from.
    """
    strategy: Any = (
        CpuFabricStrategy(
            stage=stage or 0, process_group_backend="gloo", config=None, logging_batch_size_per_gpu=2
        )
        if stage is not None
        else fabric_ddp.DDPStrategy(process_group_backend="gloo")
    )
    runs = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy)
    runs.launch()
    torch.manual_seed(0)
    with runs.init_module():
        model = AutoModelForCausalLM.from_config(config("llama"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.01)
    model, optimizer = runs.setup(model, optimizer)
    batches = runs.setup_dataloaders(loader())
    path = folder / f"fabric{stage}"
    losses = []

    def train(count: int) -> None:
        for _, batch in zip(range(count), batches, strict=False):
            loss = model(input_ids=batch, labels=batch).loss
            runs.backward(loss)
            if stage is None:  # DeepSpeed does, unless its configuration says otherwise
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    train(2)
    state = {"model": model, "optimizer": optimizer, "seen": 2}
    runs.save(path, state)
    train(2)
    state["seen"] = 0
    runs.load(path, state)
    train(2)
    return {"losses": losses, "seen": state["seen"]}


class Summaries(pl.Callback):
    """What Lightning's summary of a sharded model counts, when training begins."""

    def __init__(self) -> None:
        self.whole, self.here = 0, 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        summary = DeepSpeedSummary(module)
        self.whole, self.here = summary.total_parameters, sum(summary.parameters_per_layer)


def defaults(folder: Path, *, stage: int | None) -> dict[str, Any]:
    """With whatever Lightning does by default: a summary, checkpoints, a logger, a progress bar."""
    pl.seed_everything(0)
    module, seen = Module(), Summaries()
    path = folder / f"defaults {stage}"
    strategy: ParallelStrategy = (
        DDPStrategy(process_group_backend="gloo")
        if stage is None
        else CpuDeepSpeedStrategy(stage=stage, process_group_backend="gloo")
    )
    runs = pl.Trainer(
        default_root_dir=path,
        accelerator="cpu",
        devices=world_size(),
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[] if stage is None else [seen],
        logger=CSVLogger(path),  # what the default one is depends on whether tensorboard is installed
    )
    runs.fit(module, loader())
    saved = Path(runs.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    whole = sum(param.numel() for param in module.parameters())
    return {
        "losses": module.losses,
        "counts": [seen.whole, seen.here],
        "whole": whole,
        "is_saved": saved.exists(),
    }


CASES = {
    "ddp": partial(fit, name="ddp", stage=None),
    "stage 1": partial(fit, name="one", stage=1),
    "stage 2": partial(fit, name="two", stage=2),
    "stage 3": partial(fit, name="three", stage=3),
    "stage 3, made sharded": partial(fit, name="late", stage=3, is_late=True),
    "ddp, divided twice": partial(fit, name="ddp free", stage=None, share=1 / ACCUMULATED, **FREE),
    "stage 2, not clipped": partial(fit, name="two free", stage=2, **FREE),
    "ddp, not clipped": partial(fit, name="ddp once", stage=None, **FREE),
    "stage 2, made up for": partial(fit, name="two once", stage=2, share=ACCUMULATED, **FREE),
    "ddp, resumed": partial(fit, name="ddp again", stage=None, resumes="ddp"),
    "stage 2, resumed": partial(fit, name="two again", stage=2, resumes="two"),
    "stage 3, resumed": partial(fit, name="three again", stage=3, is_late=True, resumes="late"),
    "ddp, defaults": partial(defaults, stage=None),
    "stage 3, defaults": partial(defaults, stage=3),
    "validated, ddp": partial(validate, stage=None, trained="ddp"),
    "validated, stage 2": partial(validate, stage=2, trained="two"),
    "validated, stage 3": partial(validate, stage=3, trained="late"),
    "in turn, ddp": partial(one_after_the_other, stage=None),
    "in turn, stage 2": partial(one_after_the_other, stage=2),
    "in turn, stage 3": partial(one_after_the_other, stage=3),
    "fabric, ddp": partial(fabric, stage=None),
    "fabric, stage 2": partial(fabric, stage=2),
    "fabric, stage 3": partial(fabric, stage=3),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(CASES)
