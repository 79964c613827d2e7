"""An engine that answers: `engine(inputs)` and `engine.generate(inputs)`, without gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.step_engine import StepEngine
from ..errors import ConfigError
from .forward_times import ForwardTimes
from .options import InferenceOptions
from .speedups import Speedups
from .words import in_words_of_inference


class InferenceEngine(StepEngine):
    """A model in evaluation mode. Attributes that the engine does not have itself are the module's."""

    _options = InferenceOptions()
    _speedups = Speedups()
    _times: ForwardTimes | None = None
    _config: Any = None  # options as the program gave them

    def prepare(self, options: InferenceOptions, speedups: Speedups) -> None:
        """Take over what the program wants, before the first forward.

        Order:  a collective
        Errors: ConfigError if the keys and values of `min_tokens` do not fit
        """
        self._options, self._speedups = options, speedups
        self.eval()
        if options.min_tokens > 1:
            self._generating.check_room(options.min_tokens)
        if speedups.compiles:
            self.compile()

    @property
    def config(self) -> Any:
        """Return the module's own config, as transformers gives its models one; None without."""
        return getattr(self.module, "config", None)

    @property
    def mp_group(self) -> Any:
        """Return the process group of the ranks that divide layers with this one; None without any."""
        axis = self._domains.dense.comm.mesh.copies
        return None if axis.is_alone else axis.group or dist.group.WORLD

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Order: a collective of the ranks that share weights or layers
        """
        with in_words_of_inference():
            return super().forward(*args, **kwargs)

    @property
    def generate(self) -> Callable[..., Any]:
        """The module's own `generate`, in a block of `generating()`. There is none if the module has none.

        Order:  a collective of the ranks that share weights or layers
        Errors: as `StepEngine.generate`; ConfigError for a prompt beyond `max_out_tokens`
        """
        return partial(self._generate, super().generate)

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_length(args, kwargs)
        if self._speedups.static_cache and not {"cache_implementation", "generation_config"} & kwargs.keys():
            kwargs["cache_implementation"] = "static"
        with in_words_of_inference():
            return generate(*args, **kwargs)

    def _check_length(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        most = self._options.max_tokens
        given = [args[0] if args else None, kwargs.get("input_ids"), kwargs.get("inputs")]
        if self._options.is_lenient:  # DeepSpeed looks at no other argument
            given = given[1:2]
        for prompt in given:
            if most is None or not isinstance(prompt, Tensor) or prompt.dim() != 2:
                continue
            if prompt.shape[1] > most:
                raise ConfigError(
                    f"Input with size {prompt.shape[1]} exceeds maximum length of {most}: the engine was "
                    "made for so many tokens; give init_inference() a larger max_out_tokens, or shorter "
                    "prompts"
                )

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure each forward of the module from now on; `model_times()` has the times.

        `use_cuda_events` False: wait for the GPU before and after each.
        """
        if self._times is None:
            self._times = ForwardTimes(self.module, self.device, by_events=use_cuda_events)

    def model_times(self) -> list[float]:
        """Return how long each forward took since the last call.

        Units:  milliseconds
        Errors: ConfigError if nothing is measured
        """
        if self._times is None:
            raise ConfigError(
                "engine.model_times(): nothing is measured; call engine.profile_model_time() before the "
                "forwards"
            )
        return self._times.take()

    def _close(self) -> None:
        if self._times is not None:
            self._times.close()
            self._times = None
        super()._close()
