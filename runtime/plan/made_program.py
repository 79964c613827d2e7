"""A training loop for a model that is named by its configuration alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..compat.engine.initialize import initialize
from ..errors import ConfigError
from ..zero.api import Init
from .program import NUM_STEPS


class ModelRequest(NamedTuple):
    """A model of transformers and its batch."""

    model: str  # folder with a config.json, or that file
    batch: str  # micro batch x length, as 4x2048
    config: dict[str, Any]  # ds_config
    is_checkpointed: bool  # its blocks are computed again in the backward


def made_program(request: ModelRequest) -> Callable[[], object]:
    """Return the call that trains the model on random tokens.

    Errors: ConfigError for a batch or a model that cannot be made
    """
    num_samples, length = _sizes(request.batch)

    def run() -> None:
        model = _model(request)
        if request.is_checkpointed:
            model.gradient_checkpointing_enable()
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=request.config)
        vocabulary = model.config.get_text_config().vocab_size
        for _ in range(NUM_STEPS * engine.gradient_accumulation_steps()):
            ids = torch.randint(0, vocabulary, (num_samples, length), device="cpu").to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()

    return run


def _model(request: ModelRequest) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"--model needs transformers, which cannot be imported: {error}") from error
    try:
        config = AutoConfig.from_pretrained(request.model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {request.model}: {error}") from error
    is_sharded = request.config.get("zero_optimization", {}).get("stage") == 3
    with Init(config_dict_or_path=request.config, enabled=is_sharded):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def _sizes(batch: str) -> tuple[int, int]:
    number, by, length = batch.partition("x")
    if not (by and number.isdecimal() and length.isdecimal() and int(number) and int(length)):
        raise ConfigError(f"--batch {batch}: give samples and tokens of each, such as 4x2048")
    return int(number), int(length)
