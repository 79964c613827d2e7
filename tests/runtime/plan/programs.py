"""Small training programs, each with the ds_config that it is given: what is rehearsed, and really run."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import dslaunch

NUM_STEPS = 3  # one more than is planned
WIDTH, DEPTH, VOCAB, LENGTH, SAMPLES = 64, 4, 320, 32, 4
ROOT = Path(__file__).parents[3]
Config = dict[str, Any]
Program = Callable[[Config], None]


def train(model: nn.Module, config: Config, loss_of: Callable[[Any, Tensor], Tensor], **given: Any) -> None:
    """Train as programs for DeepSpeed do, on tokens."""
    engine, *_ = dslaunch.initialize(model=model, config=config, **given)
    torch.manual_seed(1)
    for _ in range(NUM_STEPS * engine.gradient_accumulation_steps()):
        tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH)).to(engine.device)
        engine.backward(loss_of(engine, tokens))
        engine.step()


def loss_of_labels(engine: Any, tokens: Tensor) -> Tensor:
    """Return the loss that a model of transformers computes."""
    loss: Tensor = engine(input_ids=tokens, labels=tokens).loss
    return loss


class Blocks(nn.Module):
    """An embedding, blocks of two layers with a norm, and a head."""

    def __init__(self, *, is_tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Linear(4 * WIDTH, WIDTH),
                nn.Dropout(dropout),
            )
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.head(x)
        return scores


class Checkpointed(Blocks):
    """Blocks whose activations are computed again in the backward."""

    is_reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.is_reentrant)
        scores: Tensor = self.head(x)
        return scores


class CheckpointedAgain(Checkpointed):
    """The same by torch's older way."""

    is_reentrant = True


class Recurrent(nn.Module):
    """An embedding, an LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return scores


class Convolutions(nn.Module):
    """Images become classes by convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 16, 32, 64]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(one, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU())
                for one, other in pairwise(widths)
            )
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(functional.max_pool2d(self.layers(images), 4).mean((2, 3)))
        return scores


def loss_of_scores(engine: Any, tokens: Tensor) -> Tensor:
    """Return the loss of the program's own head."""
    scores = engine(tokens)
    return functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())


def loss_of_images(engine: Any, tokens: Tensor) -> Tensor:
    """Return the loss of images with a class each."""
    dtype = next(engine.parameters()).dtype
    images = tokens.new_zeros((SAMPLES, 3, LENGTH, LENGTH), dtype=dtype).normal_()
    return functional.cross_entropy(engine(images).float(), tokens[:, 0] % 10)


def blocks(config: Config, **options: Any) -> None:
    """Train plain blocks."""
    train(Blocks(**options), config, loss_of_scores)


def frozen_blocks(config: Config) -> None:
    """Train plain blocks, the first half of which is frozen."""
    model = Blocks()
    for part in (model.embedding, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)
    train(model, config, loss_of_scores)


def made_in_shards(config: Config) -> None:
    """Train blocks that are made below zero.Init."""
    with dslaunch.zero.Init(config_dict_or_path=config):
        model = Blocks()
    train(model, config, loss_of_scores)


def client_optimizer(config: Config, kind: str = "AdamW", **options: Any) -> None:
    """Train with an optimizer of torch's that the program makes."""
    model = Blocks()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.001, **options)
    train(model, {key: value for key, value in config.items() if key != "optimizer"}, loss_of_scores,
          optimizer=optimizer)  # fmt: skip


def in_autocast(config: Config) -> None:
    """Train with torch's autocast in the program."""

    def loss_of(engine: Any, tokens: Tensor) -> Tensor:
        with torch.autocast(engine.device.type, torch.bfloat16):
            return loss_of_scores(engine, tokens)

    train(Blocks(), config, loss_of)


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_hugging_face(kind: str, **changes: Any) -> Any:
    """Return a causal model of transformers with random weights."""
    import transformers

    if kind == "GPT2":
        sizes: dict[str, Any] = {
            "vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **changes))
    more: dict[str, Any] = {
        "Mixtral": {"num_local_experts": 4},
        "Qwen3Moe": {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "head_dim": 16,
            "decoder_sparse_step": 1,
        },
    }.get(kind, {})  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **more, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def hugging_face(config: Config, kind: str, **changes: Any) -> None:
    """Train a causal model of transformers."""
    train(make_hugging_face(kind, use_cache=False, **changes), config, loss_of_labels)


def hugging_face_checkpointed(config: Config, kind: str) -> None:
    """Train one with gradient checkpointing."""
    model = make_hugging_face(kind, use_cache=False)
    model.gradient_checkpointing_enable()
    train(model, config, loss_of_labels)


def bert(config: Config) -> None:
    """Train a model for masked words."""
    import transformers

    sizes = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
    train(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)), config, loss_of_labels)


def t5(config: Config) -> None:
    """Train an encoder and a decoder."""
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "d_model": WIDTH,
        "d_kv": 16,
        "d_ff": 2 * WIDTH,
        "num_layers": 2,
        "num_heads": 4,
    }
    made = transformers.T5Config(**sizes, decoder_start_token_id=0, use_cache=False)
    train(transformers.T5ForConditionalGeneration(made), config, loss_of_labels)


def vit(config: Config) -> None:
    """Train a model of images."""
    import transformers

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    made = transformers.ViTConfig(**sizes, image_size=LENGTH, patch_size=8, num_labels=10)

    def loss_of(engine: Any, tokens: Tensor) -> Tensor:
        dtype = next(engine.parameters()).dtype
        images = tokens.new_zeros((SAMPLES, 3, LENGTH, LENGTH), dtype=dtype).normal_()
        loss: Tensor = engine(pixel_values=images, labels=tokens[:, 0] % 10).loss
        return loss

    train(transformers.ViTForImageClassification(made), config, loss_of)


def lora(config: Config) -> None:
    """Train small matrices beside a frozen model's."""
    import peft

    adapted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    train(peft.get_peft_model(make_hugging_face("Llama", use_cache=False), adapted), config, loss_of_labels)


class PackedLinear(nn.Module):
    """A frozen layer of integers of four bits with a scale for each 64, and an adapter beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        packed = torch.arange(width * width // 2).to(torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scale", torch.full((width * width // 64, 1), 0.01))
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.stack((self.packed & 15, self.packed >> 4), 1).to(x.dtype) - 8
        weight = (numbers.view(-1, 64) * self.get_buffer("scale").to(x.dtype)).view(2 * [x.shape[-1]])
        result: Tensor = functional.linear(x, weight) + self.up(self.down(x))
        return result


def packed_blocks(config: Config) -> None:
    """Train adapters beside packed layers."""
    model = Blocks().requires_grad_(False)
    model.blocks = nn.ModuleList(PackedLinear(WIDTH) for _ in range(DEPTH))
    train(model, config, loss_of_scores)


def by_bitsandbytes(config: Config, kind: str) -> None:
    """Train adapters beside a model whose layers bitsandbytes has quantized, on CPUs."""
    import bitsandbytes
    import peft

    model = make_hugging_face("Llama", use_cache=False)
    for name, layer in list(model.named_modules()):
        if not name.endswith("_proj"):
            continue
        made: Any
        sizes = layer.in_features, layer.out_features
        if kind == "nf4":
            made = bitsandbytes.nn.Linear4bit(*sizes, bias=False, quant_type="nf4")
        else:
            made = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        made.load_state_dict(layer.state_dict())
        model.set_submodule(name, made.to("cpu"))
    adapted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    train(peft.get_peft_model(model, adapted), config, loss_of_labels)


def by_torchao(config: Config) -> None:
    """Train adapters beside a model whose layers torchao has quantized."""
    import peft
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = make_hugging_face("Llama", use_cache=False)
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name.endswith("_proj"))
    adapted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    train(peft.get_peft_model(model, adapted), config, loss_of_labels)


def trainer(config: Config) -> None:
    """Train a model of transformers with its own loop."""
    import importlib

    import transformers

    for name in (
        "accelerate.utils",
        "accelerate.accelerator",
        "accelerate",
        "transformers.integrations.deepspeed",
    ):
        importlib.reload(importlib.import_module(name))  # they have looked for deepspeed too early

    class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 100 * SAMPLES

        def __getitem__(self, place: int) -> dict[str, Tensor]:
            tokens = torch.arange(LENGTH).add(place) % VOCAB
            return {"input_ids": tokens, "labels": tokens}

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=SAMPLES, max_steps=NUM_STEPS, report_to="none",
            deepspeed={**config, "train_micro_batch_size_per_gpu": SAMPLES}, save_strategy="no",
            bf16=config.get("bf16", {}).get("enabled", False), disable_tqdm=True, learning_rate=0.001,
            gradient_accumulation_steps=config.get("gradient_accumulation_steps", 1),
        )  # fmt: skip
        model = make_hugging_face("Llama", use_cache=False)
        transformers.Trainer(model, arguments, train_dataset=Tokens()).train()


def train_chars(config: Config) -> None:
    """Run the example, as a script."""
    import json

    path = ROOT / "docs/examples/train_chars.py"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        sys.argv = [str(path), "--steps", str(NUM_STEPS), "--deepspeed", "--deepspeed_config", file.name]
        runpy.run_path(str(path), run_name="__main__")


class _Embed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCAB, WIDTH)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return result


def _loss_of_stage(scores: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(scores.float().flatten(0, 1), tokens.flatten())


def pipeline(
    config: Config,
    schedule: str = "1f1b",
    *,
    num_stages: int = 2,
    is_tied: bool = False,
    lengths: Sequence[int] = (LENGTH,),
    **options: Any,
) -> None:
    """Train a model in stages; its micro batches have these lengths in turn."""
    from dslaunch.runtime.compat.pipeline.module import PipelineModule
    from dslaunch.runtime.pipeline.layers import LayerSpec, TiedLayerSpec

    dslaunch.init_distributed()
    first, last = LayerSpec(_Embed), LayerSpec(nn.Linear, WIDTH, VOCAB)
    if is_tied:
        first = TiedLayerSpec("words", _Embed)
        last = TiedLayerSpec("words", _Embed, forward_fn=_scores_of_words)
    layers = [first, *(LayerSpec(_Layer) for _ in range(DEPTH)), last]
    module = PipelineModule(
        layers, num_stages, loss_fn=_loss_of_stage, partition_method="uniform", schedule=schedule, **options
    )
    engine: Any
    engine, *_ = dslaunch.initialize(model=module, config=config)
    for _ in range(NUM_STEPS):
        number = engine.gradient_accumulation_steps()
        batch = [
            (torch.arange(SAMPLES * length).view(SAMPLES, length) % VOCAB).to(engine.device)
            for length in (*lengths,) * number
        ]
        engine.train_batch(iter([(tokens, tokens) for tokens in batch[:number]]))


def _scores_of_words(words: nn.Embedding, x: Tensor) -> Tensor:
    return functional.linear(x, words.weight)


def sequences(config: Config) -> None:
    """Train a model of transformers on sequences that all ranks share."""
    from dslaunch.runtime.sequence.hugging_face import UlyssesSPAttentionHF
    from dslaunch.runtime.sequence.loss import mean_over_tokens

    dslaunch.init_distributed()
    model = make_hugging_face("Llama", use_cache=False)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, SAMPLES)
    engine: Any
    engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=config)
    first = torch.distributed.get_rank() * LENGTH
    for _ in range(NUM_STEPS):
        tokens = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH).to(engine.device) % VOCAB
        positions = torch.arange(first, first + LENGTH).repeat(SAMPLES, 1).to(engine.device)
        logits = engine(input_ids=tokens, position_ids=positions, use_cache=False).logits
        engine.backward(mean_over_tokens(logits, tokens))
        engine.step()


def experts(config: Config, ep_size: int) -> None:
    """Train layers of experts of a fixed capacity."""
    from tests.runtime.experts.models import loss_of, make_layered

    dslaunch.init_distributed()
    model = make_layered(torch.distributed.get_rank() if ep_size > 1 else 0, ep_size)
    engine: Any
    engine, *_ = dslaunch.initialize(model=model, config=config)
    for _ in range(NUM_STEPS):
        samples = torch.ones(1024, 7, dtype=torch.bfloat16).to(engine.device)
        engine.backward(loss_of(engine, samples))
        engine.step()


LOAD_FROM = "load_from"


def resumed(config: Config, program: Program) -> None:
    """Run a program whose new engine loads a checkpoint, from the folder that the config names, before its
    first step.
    """
    config = dict(config)
    folder = config.pop(LOAD_FROM)
    plain: Any = dslaunch.initialize

    def initialize(**given: Any) -> Any:
        made = plain(**given)
        made[0].load_checkpoint(folder)
        return made

    with patch.object(dslaunch, "initialize", initialize):
        program(config)


PROGRAMS: dict[str, Program] = {
    "blocks": blocks,
    "blocks, tied": partial(blocks, is_tied=True),
    "blocks, dropout": partial(blocks, dropout=0.1),
    "blocks, half frozen": frozen_blocks,
    "blocks, zero.Init": made_in_shards,
    "blocks, torch.optim.AdamW": client_optimizer,
    "blocks, torch.optim.SGD": partial(client_optimizer, kind="SGD", momentum=0.9),
    "blocks, torch.optim.Adafactor": partial(client_optimizer, kind="Adafactor"),
    "blocks, autocast": in_autocast,
    "blocks, checkpointed": lambda config: train(Checkpointed(), config, loss_of_scores),
    "blocks, checkpointed, reentrant": lambda config: train(CheckpointedAgain(), config, loss_of_scores),
    "lstm": lambda config: train(Recurrent(), config, loss_of_scores),
    "convolutions": lambda config: train(Convolutions(), config, loss_of_images),
    **{kind: partial(hugging_face, kind=kind) for kind in ("Llama", "GPT2", "Mixtral", "Qwen3Moe")},
    "Llama, eager attention": partial(hugging_face, kind="Llama", attn_implementation="eager"),
    "Llama, checkpointed": partial(hugging_face_checkpointed, kind="Llama"),
    "Llama, LoRA": lora,
    "Llama, 4 bits, LoRA": partial(by_bitsandbytes, kind="nf4"),
    "Llama, 8 bits, LoRA": partial(by_bitsandbytes, kind="int8"),
    "Llama, torchao, LoRA": by_torchao,
    "packed, adapters": packed_blocks,
    "Llama, Trainer": trainer,
    "Bert": bert,
    "T5": t5,
    "ViT": vit,
    "train_chars.py": train_chars,
    "blocks, resumed": partial(resumed, program=blocks),
    "pipeline, resumed": partial(resumed, program=pipeline),
    "pipeline": pipeline,
    "pipeline, 4 stages": partial(pipeline, num_stages=4),
    "pipeline, two lengths": partial(pipeline, lengths=(LENGTH, 2 * LENGTH)),
    "pipeline, checkpointed": partial(pipeline, activation_checkpoint_interval=1),
    "pipeline, tied": partial(pipeline, is_tied=True),
    "pipeline, gpipe": partial(pipeline, schedule="gpipe"),
    "pipeline, interleaved": partial(pipeline, schedule="interleaved"),
    "pipeline, zero bubble": partial(pipeline, schedule="zero_bubble"),
    "pipeline, zbv": partial(pipeline, schedule="zbv"),
    "pipeline, dualpipev": partial(pipeline, schedule="dualpipev"),
    "Llama, sequences over ranks": sequences,
    "experts": partial(experts, ep_size=1),
    "experts over ranks": partial(experts, ep_size=2),
}
