"""Training of a model that is named by its configuration alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError
from ..zero.api import Init
from .training import train


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
        vocabulary = model.config.get_text_config().vocab_size

        def tokens() -> dict[str, torch.Tensor]:
            ids = torch.randint(0, vocabulary, (num_samples, length), device="cpu")
            return {"input_ids": ids, "labels": ids}

        train(model, tokens, request.config)

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
    section = request.config.get("zero_optimization")
    is_sharded = isinstance(section, dict) and section.get("stage") == 3  # what is none is refused later
    with Init(config_dict_or_path=request.config, enabled=is_sharded):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def _sizes(batch: str) -> tuple[int, int]:
    number, by, length = batch.partition("x")
    if not (by and number.isdecimal() and length.isdecimal() and int(number) and int(length)):
        raise ConfigError(f"--batch {batch}: give samples and tokens of each, such as 4x2048")
    return int(number), int(length)
