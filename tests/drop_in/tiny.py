"""What the workers of this folder train: a tiny model, its tokenizer, its texts, all made here,
and what they note of it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from cases import world_size
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
    TrainingArguments,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

WORDS = [
    "a",
    "the",
    "one",
    "two",
    "red",
    "blue",
    "green",
    "small",
    "large",
    "old",
    "cat",
    "dog",
    "bird",
    "fish",
    "tree",
    "house",
    "river",
    "stone",
    "runs",
    "sleeps",
    "sees",
    "finds",
    "eats",
    "gives",
    "under",
    "over",
    "near",
    "with",
    "and",
    "but",
    "so",
    "then",
    "here",
    "there",
    "now",
    "soon",
    ".",
    "?",
    "!",
]
STEPS = 4
EPSILON = 1e-3  # in the order of the gradients: what Adam does is smooth in them, and not all but their sign
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    vocabulary = {word: place for place, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def text(seed: int, *, length: int) -> str:
    """Return so many words, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(WORDS), (length,), generator=generator).tolist()
    return " ".join(WORDS[place] for place in places)


def config(kind: str) -> Any:
    """Return the shape of a Llama, a Qwen2 or a Qwen3-MoE with two layers, 32 wide."""
    makes: Any = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3_moe": Qwen3MoeConfig}[kind]
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    return makes(
        **(more if kind == "qwen3_moe" else {}),
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def ds_config(stage: int, *, has_optimizer: bool) -> dict[str, Any]:
    """Return a ds_config as Hugging Face's documentation has them: what its own arguments say is "auto".

    Without `has_optimizer` it is the Trainer that makes one, which decays no weights of norms.
    """
    adamw = {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    }
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **({"optimizer": adamw} if has_optimizer else {}),
    }


def begin_case() -> None:
    """Forget what Accelerate and Transformers keep of the case before; the process group stays."""
    unset_hf_deepspeed_config()
    gc.collect()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    transformers.set_seed(0)


def arguments(
    folder: Path, *, stage: int | None, kind: Any = TrainingArguments, has_optimizer: bool = True, **more: Any
) -> Any:
    """Return the arguments for a Trainer with that ds_config; without a stage: for plain torch, and DDP if
    there are more ranks.

    Without a GPU Accelerate asks for no backend, and would have each rank train alone; the state that it is
    given here says gloo.
    """
    place: dict[str, Any]
    if stage is None:
        place = {"use_cpu": True, "ddp_backend": "gloo" if world_size() > 1 else None}
    else:
        place = {"deepspeed": ds_config(stage, has_optimizer=has_optimizer)}
        if world_size() > 1:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
            place["accelerator_config"] = {"use_configured_state": True}
    return kind(
        output_dir=str(folder),
        **place,
        **{
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "adam_epsilon": EPSILON,
            "weight_decay": 0.01,
            "max_grad_norm": 0.05,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **more,
        },
    )


class Recorded:
    """Goes before a Trainer: notes the loss of every micro batch on this rank, of evaluations too."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        vars(self).setdefault("losses", []).append(loss.item())
        return loss


class LoggedTrainer(Recorded, transformers.Trainer):
    pass


class Rows(torch.utils.data.Dataset[Any]):
    """Token ids, the same on every rank."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(place)
        ids = torch.randint(4, len(SPECIAL) + len(WORDS), (12,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def norms(trainer: Any) -> list[float]:
    """Return the gradient's norm in every step, as the Trainer has logged it."""
    return [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


def numbers(weights: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return weights as JSON holds them."""
    return {name: value.detach().double().reshape(-1).tolist() for name, value in weights.items()}
