"""Answers that a model in training generates for itself: DeepSpeed's `deepspeed.runtime.rollout`.

A rank stops when all of its answers have ended. DeepSpeed has all ranks generate `max_new_tokens`, and pads
what comes after the ends.
Source: DeepSpeed 0.19.8 runtime/rollout/base.py and hybrid_engine_rollout.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.step_engine import StepEngine
from ..errors import ConfigError

_ENGINE = "hybrid_engine"
_NOT_HERE = {  # options of DeepSpeed's own loops, and what to do without
    "use_graph_capture": "give generate() of transformers a static cache and compile the module",
    "enable_profiling": "dslaunch --trace shows where the time goes",
    "use_shared_prefill": "prompts are repeated",
    "align_decode_fronts": "it is for continuous batching",
    "enable_cache_trimming": "it is for continuous batching",
    "continuous_cache_capacity": "it is for continuous batching",
}


@dataclass
class RolloutConfig:
    """How answers are generated; DeepSpeed has one way, "hybrid_engine"."""

    engine: str = _ENGINE
    use_graph_capture: bool = False


@dataclass
class HybridEngineRolloutConfig:
    """Options of DeepSpeed's own loops, which are refused by name unless they are off."""

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None


@dataclass
class SamplingConfig:
    """How tokens are chosen. A temperature of 0 takes the likeliest; a `top_k` of 0 or less is none."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None


@dataclass
class RolloutRequest:
    """Prompts, padded at the left.

    Shapes: prompt_ids and prompt_attention_mask [prompts, tokens]
    Errors: ValueError for other shapes
    """

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        _check_shapes("prompt_ids", self.prompt_ids, "prompt_attention_mask", self.prompt_attention_mask)


@dataclass
class RolloutBatch:
    """Prompts with their answers, padded at the right.

    Shapes: input_ids and attention_mask [answers, tokens]; response_start_idx [answers]
    Errors: ValueError for other shapes
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor

    def __post_init__(self) -> None:
        _check_shapes("input_ids", self.input_ids, "attention_mask", self.attention_mask)
        if self.response_start_idx.shape != self.input_ids.shape[:1]:
            raise ValueError(
                f"response_start_idx must be 1-D of length {len(self.input_ids)}, one for each answer; it is "
                f"{list(self.response_start_idx.shape)}"
            )

    @property
    def batch_size(self) -> int:
        """Number of answers."""
        return int(self.input_ids.shape[0])

    @property
    def seq_len(self) -> int:
        """Number of tokens of the longest prompt and answer."""
        return int(self.input_ids.shape[1])


class RolloutEngine(ABC):
    """Source of answers for a trainer."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return the prompts with their answers."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Give the weights of this step to what generates."""

    def shutdown(self) -> None:  # noqa: B027  (may be left as it is)
        """End what generates; there may be nothing."""


class HybridEngineRollout(RolloutEngine):
    """Answers by the engine that trains."""

    name = _ENGINE

    def __init__(self, engine: StepEngine, tokenizer: Any, cfg: object = None) -> None:
        """`tokenizer` has `pad_token_id` and `eos_token_id`.

        Errors: ConfigError for an option that is not here
        """
        for option, instead in _NOT_HERE.items():
            value = getattr(cfg, option, None)
            if value:
                raise ConfigError(f"a rollout with {option}={value!r} is not available here: {instead}")
        self.engine, self.tokenizer = engine, tokenizer

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return `n_samples_per_prompt` answers to each prompt, those of one prompt side by side.

        Order:  a collective; answers of other ranks may have other lengths
        Errors: ConfigError for continuous batching; ValueError if the tokenizer has neither token
        """
        if sampling.continuous_batch_size is not None:
            raise ConfigError(
                f"a rollout with continuous_batch_size={sampling.continuous_batch_size} is not available "
                "here: leave it out, and give fewer prompts at once"
            )
        end, padding = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        if padding is None:
            padding = end[0] if isinstance(end, list | tuple) and end else end
        if padding is None:
            raise ValueError("the tokenizer has neither pad_token_id nor eos_token_id; set one of them")
        prompts = request.prompt_ids.repeat_interleave(sampling.n_samples_per_prompt, dim=0)
        mask = request.prompt_attention_mask.repeat_interleave(sampling.n_samples_per_prompt, dim=0)
        choice: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if choice["do_sample"]:
            choice |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            choice["top_k"] = max(sampling.top_k, 0)
        made: Tensor = self.engine.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=end,
            pad_token_id=padding,
            **choice,
        )
        start = prompts.shape[1]
        answered = _until_end(made[:, start:], () if end is None else end, padding)
        return RolloutBatch(
            input_ids=made,
            attention_mask=torch.cat([mask.to(answered.dtype), answered], dim=1),
            response_start_idx=torch.full((len(made),), start, dtype=torch.int64, device=made.device),
        )

    def sync_weights(self, step: int) -> None:
        """Do nothing: the engine that trains has the weights."""


def build_rollout(
    rollout_cfg: Any, student_engine: StepEngine | None = None, tokenizer: Any = None, **kwargs: object
) -> RolloutEngine:
    """Return what `rollout_cfg.engine` names.

    Errors: ValueError for another name than "hybrid_engine", or without engine and tokenizer
    """
    if rollout_cfg.engine != _ENGINE:
        raise ValueError(f'Unknown rollout engine {rollout_cfg.engine!r}; there is "{_ENGINE}"')
    if student_engine is None or tokenizer is None:
        raise ValueError(f'build_rollout() with "{_ENGINE}" needs both student_engine and tokenizer')
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)


def _until_end(answers: Tensor, end: Any, padding: int) -> Tensor:
    """Return 1 for the tokens of each answer up to its end, and 0 for the padding after it.

    Shapes: answers and the result [answers, tokens], int64
    """
    ends = torch.as_tensor(end, device=answers.device, dtype=answers.dtype).flatten()
    is_end = torch.isin(answers, ends)
    is_over = is_end.cumsum(1) - is_end.long() > 0
    return (~is_over & ((answers != padding) | is_end)).long()


def _check_shapes(name: str, ids: Tensor, mask_name: str, mask: Tensor) -> None:
    if ids.dim() != 2:
        raise ValueError(f"{name} must be 2-D [texts, tokens]; it is {list(ids.shape)}")
    if mask.shape != ids.shape:
        raise ValueError(
            f"{mask_name} {list(mask.shape)} does not match {name} {list(ids.shape)}; give both of one shape"
        )
