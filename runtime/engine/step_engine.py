"""An engine whose micro batches the program runs: with `engine(batch)`, `engine.backward(loss)` and
`engine.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..activation import checkpointing
from ..errors import ConfigError
from ..placement.generation_plan import Generation, KeysAndValues
from ..zero.model.offload_kinds import OffloadStateTypeEnum
from .base import EngineBase, to_half
from .generating import Generating
from .instruments import loss_value
from .rerun import Rerun


class StepEngine(EngineBase):
    """Engine whose calls of `step()` each end a micro batch. At a gradient accumulation boundary it then
    takes one optimizer step, see `OptimizerStep`, and steps the scheduler.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """Order: a collective"""
        super().__init__(module, **options)
        self._rerun: Rerun | None = None
        if self.settings.rerun_outliers and self._optimizer_step is not None:
            self._rerun = self._optimizer_step.rerun = Rerun(
                self.module,
                self._domains.job,
                self.device,
                sigmas=self.settings.rerun_outliers,
                forward=self._forward_again,
            )
        self._generating = Generating(module, self._model, self._instruments.generating)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self._checkpoints.end_if_saved()
        if self.settings.fp16.auto_cast and self.settings.fp16.enabled:
            args, kwargs = tree_map(to_half, (args, kwargs))
        self._model.parked_states.check_here("a forward", (OffloadStateTypeEnum.lp_params,))
        self._model.begin_forward()
        if self._divided is not None:
            self._divided.inputs.look(args, kwargs)
        if self._divided_sequences is not None:
            args, kwargs = self._divided_sequences.begin_forward(args, kwargs)
        with (
            self._instruments.forward(args, kwargs),
            self._autocast(),
            self._schedule.forward(),
            self._naming_misfits(),
            checkpointing.around_forward(),
        ):
            output = self._run_module(args, kwargs)
        if self._divided_sequences is not None:
            self._divided_sequences.end_forward()
        return output

    def _run_module(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._rerun is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        with self._rerun.keeping(args, kwargs) as take:
            output = self.module(*args, **kwargs)
            take(output)
        return output

    def _forward_again(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module once more, as in `forward`, but as part of no step."""
        self._model.begin_forward()
        with self._autocast(), self._naming_misfits():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add this micro batch's gradients, as its part of the mean over the accumulated micro batches;
        return the loss as such a part, too.

        `scale_wrt_gas` False: the given loss is such a part already.
        """
        self._checkpoints.end_if_saved()
        _check_loss(loss, "backward")
        if scale_wrt_gas:
            loss = self._share(loss)
        self._begin_backward(loss)
        self._model.parked_states.check_here(
            "engine.backward()", (OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads)
        )
        with self._instruments.time("backward"):
            if self._optimizer_step is not None:
                self._optimizer_step.roll_call.freezing.look()
            self._model.begin_backward()
            with self._direct_backward.known():
                self._enlarged(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self._model.end_backward()
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss as a part of the mean over the accumulated micro batches, times the loss scale.

        `engine.scale(loss).backward()` does what `engine.backward(loss)` does,
        for code that calls backward by itself.
        Errors: ConfigError for a loss that is not one number with a gradient
        """
        _check_loss(loss, "scale")
        loss = self._share(loss)
        self._begin_backward(loss)
        return self._direct_backward.known_from(self._enlarged(loss))

    def _share(self, loss: Tensor) -> Tensor:
        steps = self._accumulation.steps
        return loss / steps if steps > 1 else loss

    def _enlarged(self, loss: Tensor) -> Tensor:
        factor = self._scaler.scale * self._accumulation.sum_over
        return loss if factor == 1.0 else loss.float() * factor

    def _begin_backward(self, loss: Tensor) -> None:
        self._model.parked_states.check_kept("engine.backward()")
        self._accumulation.begin_micro_batch()
        value = loss_value(loss)
        self._instruments.note_loss(value)
        if self._optimizer_step is not None:
            self._optimizer_step.skipped.note_loss(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Say that the micro batches inside end no optimizer step: `step()` is an error there.

        Replicated gradients (stages 0 and 1) are averaged in the backward that ends a step. No backward
        inside does; if none follows, `step()` averages. Sharded gradients (stages 2 and 3) are averaged in
        every backward, inside too, because waiting would cost the memory that sharding saves.
        """
        with self._accumulation.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Average the gradients of all backwards inside once, at the end; `step()` is an error until then.

        At stages 2 and 3 this means one reduction in place of one for each micro batch; meanwhile every rank
        holds whole gradients in the parameters' dtype. Gradients of several blocks before a step add up. At
        stages 0 and 1 `step()` does the averaging.
        Order:  a collective at the end
        Errors: ConfigError inside another such block
        """
        self._check_managed("coalesce_grad_reduction()")
        self._model.check_averaged()
        with self.no_sync(), self._model.coalesced():
            yield

    def _check_managed(self, call: str) -> None:
        if not self._accumulation.is_managed:
            raise ConfigError(
                f"engine.{call} where the ds_config says managed_gradient_accumulation false: every step() "
                "updates there; call step() when an update is due, or leave that key out"
            )

    def allreduce_gradients(self) -> None:
        """At a boundary, make `p.grad` the average, if ranks hold whole gradients.

        A step does not need this call. At stage 0 `p.grad` is the average after the backward already; at
        stage 1 the ranks send each other their shards of the averages here.
        Order: a collective
        """
        if self._accumulation.is_boundary:
            self._model.average_gradients()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the micro batch; at a boundary, update the parameters. See `OptimizerStep`.

        Order:  a collective at a boundary
        Errors: ConfigError inside no_sync(). After the step: CheckpointError if a save beside training has
                failed; LossScaleError if fp16's loss scale would have to fall below its minimum;
                SkippedStepsError after `max_skipped_steps` in a row
        """
        if self._accumulation.is_in_no_sync:
            raise ConfigError(
                "engine.step() inside engine.no_sync() or engine.coalesce_grad_reduction(); leave the block "
                "before the micro batch that ends a step"
            )
        self._end_micro_batch(lr_kwargs)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide from now on whether `step()` is a boundary; None counts micro batches again.

        Errors: ConfigError where managed_gradient_accumulation is false
        """
        self._check_managed("set_gradient_accumulation_boundary()")
        self._accumulation.force_boundary(is_boundary)

    def generating(
        self, *, weights: str | None = None, cache_bytes: int = 0
    ) -> AbstractContextManager[Generation]:
        """Return a block in which the module generates: in evaluation mode, without gradients.

        Each rank may run what forwards it likes inside; one that ends early, or raises, waits at the block's
        end for the others. `weights` "whole" gathers sharded parameters once, at the beginning;
        "units" gathers them in each forward, one part of the model after the other; None takes "whole" where
        that leaves on every rank a tenth of the free memory, beside `cache_bytes` of keys and values. The
        block gives the decision: `weights`, and the reason in one `line`. Training goes on afterwards as if
        nothing had been generated.
        Order:  a collective at both ends, and at each gather
        Errors: ConfigError for another word, and where ranks compute a forward together (ep, sp)
        """
        return self._generating.block(weights=weights, cache=KeysAndValues(cache_bytes))

    @property
    def generate(self) -> Callable[..., Any]:
        """The module's own `generate`, in a block of `generating()`. There is none if the module has none.

        Order:  a collective
        Errors: as `generating`; ConfigError if ranks that divide layers are given other inputs, or would draw
                other random numbers
        """
        own: Any = self.module.generate
        inputs = None if self._divided is None else self._divided.inputs
        return partial(self._generating.generate, own, inputs, self._naming_misfits)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name not in ("train_batch", "eval_batch"):
                raise
            raise AttributeError(
                f"engine.{name}(): a PipelineModule has it; any other model has engine(batch), "
                "engine.backward(loss) and engine.step()"
            ) from error


def _check_loss(loss: object, call: str) -> None:
    """Errors: ConfigError for a loss with which no backward can begin"""
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ConfigError(
            f"engine.{call}() was given {type(loss).__name__} without a gradient; give it the loss "
            "that the model computed, outside torch.no_grad()"
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"engine.{call}() was given a tensor of shape {list(loss.shape)}; a loss is one number: give its "
            "mean, or call tensor.backward(gradient) of what is none"
        )
