"""Engine of a model in stages, which runs one batch at a time: its micro batches pass through the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from ..activation import checkpointing
from ..comm.flight_recorder import Line
from ..comm.mesh import make_axis
from ..comm.numbers import on_device
from ..comm.rank_group import RankGroup
from ..config.pipeline import PipelineConfig
from ..data.loader import RepeatingLoader
from ..errors import ConfigError, PipelineError
from ..pipeline.executor import Batch, BatchOutcome, Executor
from ..pipeline.limits import MICRO_BATCH, check_fits, fitting_shape
from ..pipeline.messages import Post
from ..pipeline.module import StagesModule
from ..pipeline.neighbours import make_neighbours
from ..pipeline.reading import Reading
from ..pipeline.schedule import Table, forward_table, make_table
from ..pipeline.tied import tied_over_stages
from ..zero.units.unit import Unit
from .base import RUN_BY_THE_PROGRAM, EngineBase, to_half
from .instruments import loss_value


class StagesEngine(EngineBase):
    """`train_batch()` and `eval_batch()` in place of `engine(batch)`, `backward()` and `step()`.

    A batch has gradient_accumulation_steps micro batches. From the first to the last of them, sharded
    parameters stay whole, and gradients are summed on each rank, unless the ds_config's `pipeline` section
    says otherwise.
    """

    module: StagesModule
    _shuffles = False  # DeepSpeed's default

    def __init__(self, module: StagesModule, **options: Any) -> None:
        """Order:  a collective

        Errors: ConfigError for what does not go with a pipeline
        """
        how = options["config"].pipeline or PipelineConfig()
        module.shape = fitting_shape(module.shape, how)
        if how.activation_checkpoint_interval:
            module.set_checkpoint_interval(how.activation_checkpoint_interval)
        check_fits(module, options["config"], options["optimizer"])
        super().__init__(module, **options)
        self._how = how
        self._accumulation.force_boundary(True)  # a batch is one call
        lines = self._axes.lines(("pp",))
        self._axis = make_axis(lines)
        self._ranks_of_line = self._axes.line_of(self.global_rank, ("pp",))
        self._line = RankGroup(self._axis, self._wire, line=Line("pp", self._ranks_of_line))
        self._neighbours = make_neighbours(lines, module.shape, self._axis.index)
        post = Post(
            self._neighbours, self._wire, self.device, place=self._axis.index, ranks=self._ranks_of_line
        )
        self._executor = Executor(module, post)
        self._tables: dict[tuple[bool, int], Table] = {}
        self._is_broken = False
        self._data: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self.agg_train_loss: Tensor | None = None
        self.agg_additional_losses: dict[str, Tensor] | None = None
        self.total_loss: Tensor | None = None

    # ---- training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on gradient_accumulation_steps micro batches, in one optimizer step; return their mean loss,
        over all data, [] float32, on every rank.

        `data_iter` yields pairs (inputs, labels). Ranks of the first stage use the inputs and ranks of the
        last stage the labels, so both need the same stream; other ranks need none. By default data come from
        set_dataiterator or set_dataloader, or from initialize(training_data=...), repeated without end.
        Order:  every rank must call this
        Errors: RuntimeError inside torch.no_grad(); StopIteration, on all ranks, where the data end;
                ConfigError where they end in the middle of a batch, or ranks have other numbers
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() inside torch.no_grad(); call eval_batch() there")
        self._checkpoints.end_if_saved()
        num_micro_batches = self.micro_batches
        self.module.train()
        with self._instruments.part("data"):
            batch = self._take(partial(self._kept_source, data_iter), num_micro_batches, computes_loss=True)
        self._instruments.note_inputs(*batch.inputs)
        batch.loss_factor = self._scaler.scale * self._accumulation.sum_over / num_micro_batches
        self._model.parked_states.check_kept("train_batch()")
        self._model.parked_states.check_here("train_batch()")
        if self._optimizer_step is not None:
            self._optimizer_step.roll_call.freezing.look()
        table = self._table(num_micro_batches, is_training=True)
        with self._instruments.part("forward"), self._whole_or_broken():
            self._accumulation.begin_micro_batch()
            outcome = self._run(table, batch)
            loss, more = self._mean(outcome, num_micro_batches)
            value = loss_value(loss)
            self._instruments.note_loss(value)
            if self._optimizer_step is not None:
                self._optimizer_step.skipped.note_loss(value)
        self.agg_train_loss, self.agg_additional_losses = loss, more
        self.total_loss = torch.stack(outcome.losses).sum() if outcome.losses else None
        self._progress.micro_steps += num_micro_batches - 1  # the step counts one
        self._end_micro_batch()
        return loss

    def _run(self, table: Table, batch: Batch) -> BatchOutcome:
        is_by_micro_batch = self._how.reduce == MICRO_BATCH

        @contextmanager
        def backward() -> Iterator[None]:
            with self._instruments.time("backward"), self._direct_backward.known():
                if not is_by_micro_batch:
                    yield
                    return
                self._model.begin_backward()
                yield
                self._model.end_backward()

        with ExitStack() as stack:
            stack.enter_context(self._model.gathered(self._held_units()))
            stack.enter_context(self._accumulation.no_sync())
            if not is_by_micro_batch:
                stack.enter_context(self._model.coalesced())
                self._model.begin_backward()
            outcome = self._executor.run(
                table, batch, around_forward=self._around_forward, around_backward=backward
            )
            if not is_by_micro_batch:
                self._model.end_backward()
        return outcome

    def _held_units(self) -> Sequence[Unit]:
        """Return the units that stay whole during a batch; tied units always do: stages use them at different
        times.
        """
        if self._how.unshard != MICRO_BATCH:
            return self._model.units
        tied = {id(param) for key, _ in tied_over_stages(self.module) for param in self._tied(key)}
        return [
            unit
            for unit in self._model.units
            if any(id(member.param) in tied for one in unit.sub_buffers for member in one.members)
        ]

    def _tied(self, key: str) -> Iterable[Tensor]:
        return self.module.tied_modules[key].parameters() if key in self.module.tied_modules else ()

    @contextmanager
    def _around_forward(self) -> Iterator[None]:
        inputs = checkpointing.around_forward()
        with self._instruments.forward(), self._autocast(), self._naming_misfits(), inputs:
            yield

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        """Drop the gradients of a batch that fails in the middle. If messages between stages are still on
        their way, mark the engine as broken, because the next batch would take them for its own.
        """
        try:
            yield
        except BaseException:
            self._is_broken = self._axes.pp > 1
            self._model.zero_gradients()
            self._accumulation.forget()
            self._forget_losses()
            raise

    def _table(self, num_micro_batches: int, *, is_training: bool) -> Table:
        key = (is_training, num_micro_batches)
        if key not in self._tables:
            make = make_table if is_training else forward_table
            self._tables[key] = make(self.module.shape, num_micro_batches)
        return self._tables[key]

    def _mean(self, outcome: BatchOutcome, num_micro_batches: int) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return the mean loss of all ranks' micro batches, and the means of the module's other losses."""
        is_last = self.is_last_stage()
        job, more = self._domains.job, outcome.more_losses
        sums = on_device([0.0, is_last, bool(more)], dtype=torch.float64, device=self.device)
        if is_last:
            sums[0] = torch.stack(outcome.losses).double().sum() / num_micro_batches
        gathered = job.all_gather_float64(sums, what="the loss")
        with self._wire.recorder.waiting_for_device():
            said = gathered.tolist()
        losses = [loss for loss, has_loss, _ in said if has_loss]
        loss = self._filled(sum(losses) / len(losses))
        if not any(has_more for *_, has_more in said):
            return loss, None
        others = {name: sum(map(float, values)) / num_micro_batches for name, values in more.items()}
        other_losses = [one for one in job.all_gather_objects(others, what="other losses") if one]
        return loss, {
            name: self._filled(sum(one.get(name, 0.0) for one in other_losses) / len(other_losses))
            for name in other_losses[0]
        }

    def _filled(self, number: float) -> Tensor:
        return torch.full((), number, dtype=torch.float32, device=self.device)

    # ---- evaluating

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of so many micro batches, default those of a training batch.

        With `bcast_loss` every rank gets it, else the ranks of the last stage, and others get None.
        `reduce_output` None: a list, of each micro batch of this copy of the model. Without `compute_loss`
        it is the output of the last stage in place of the loss, on its ranks alone. `return_logits`: a pair
        of that and the last micro batch's output, None on ranks of other stages. The module stays in eval
        mode.
        Order:  every rank must call this
        Errors: StopIteration, on all ranks, where the data end; ConfigError as train_batch()
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(f"eval_batch(reduce_output={reduce_output!r}): must be 'avg' or None")
        number = self.micro_batches if num_micro_batches is None else num_micro_batches
        if not isinstance(number, int) or number < 1:
            raise ConfigError(f"eval_batch(num_micro_batches={number!r}): must be a whole number above 0")
        self.module.eval()
        batch = self._take(partial(self._source, data_iter), number, computes_loss=compute_loss)
        with torch.no_grad(), self._instruments.evaluating(), self._whole_or_broken():
            with self._model.gathered():
                outcome = self._executor.run(
                    self._table(number, is_training=False),
                    batch,
                    around_forward=self._around_forward,
                    around_backward=nullcontext,
                )
            result = self._reduced(outcome, number, compute_loss, reduce_output, bcast_loss)
        return (result, outcome.last_output) if return_logits else result

    def _reduced(
        self,
        outcome: BatchOutcome,
        number: int,
        computes_loss: bool,
        reduce_output: str | None,
        is_told: bool,
    ) -> Any:
        if not computes_loss:
            return self._reduced_outputs(outcome.outputs, reduce_output)
        if reduce_output == "avg":
            loss, _ = self._mean(outcome, number)
            return loss if is_told or self.is_last_stage() else None
        own = torch.zeros(number, dtype=torch.float64, device=self.device)
        if outcome.losses:
            own.copy_(torch.stack(outcome.losses).reshape(-1))
        losses = self._line.all_gather_float64(own, what="the losses")[self._last_place].float()
        return list(losses) if is_told or self.is_last_stage() else None

    def _reduced_outputs(self, outputs: Sequence[Any], reduce_output: str | None) -> Any:
        if not self.is_last_stage():
            return None
        if reduce_output is None:
            return list(outputs)
        total = tree_map(lambda *parts: torch.stack(parts).mean(0), outputs[0], *outputs[1:])
        others = self._domains.data
        if not others.is_alone:
            tree_map(lambda one: dist.all_reduce(one, group=others.group), total)
            total = tree_map(lambda one: one / others.size, total)
        return total

    # ---- data

    def _source(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            if not hasattr(data_iter, "__next__"):
                raise ConfigError(
                    f"train_batch() and eval_batch() take an iterator, and were given "
                    f"{type(data_iter).__name__}; give iter(loader)"
                )
            return data_iter
        if self._data is None and self.training_dataloader is not None:
            self._data = iter(RepeatingLoader(self.training_dataloader))
        if self._data is None:
            raise ConfigError(
                "there are no data: give train_batch(data_iter), or initialize(training_data=...)"
            )
        return self._data

    def _kept_source(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        self._data = self._source(data_iter)
        return self._data

    @property
    def _reads_data(self) -> bool:
        return self.is_first_stage() or self.is_last_stage()

    def _take(self, source: Callable[[], Iterator[Any]], number: int, *, computes_loss: bool) -> Batch:
        """Return this rank's part of a batch, after a check that all ranks of the job have theirs."""
        if self._is_broken:
            raise PipelineError(
                "a batch has failed in the middle, and what its stages had sent is still on its way; end the "
                "program, and go on from a checkpoint"
            )
        reading = Reading(number if self._reads_data else 0)
        if self._reads_data:
            reading.take(source, self._pair)
            if self._divided is not None:
                reading.check(self._divided.inputs.look)
            if self._divided_sequences is not None:
                reading.check(self._divided_sequences.check_shapes)
        keys = reading.agree(self._domains.job, number, self._ranks_of_line, self.device)
        inputs, labels = ([one[part] for one in reading.pairs] for part in (0, 1))
        return Batch(
            keys=keys,
            inputs=inputs if self.is_first_stage() else (),
            labels=labels if self.is_last_stage() else (),
            computes_loss=computes_loss,
        )

    def _pair(self, item: Any) -> tuple[Any, Any]:
        if self._batch_fn is not None:
            item = self._batch_fn(item)
        if not isinstance(item, tuple | list) or len(item) != 2:
            said = (
                f"{type(item).__name__} of {len(item)}" if hasattr(item, "__len__") else type(item).__name__
            )
            raise ConfigError(
                f"a micro batch is {said}; a PipelineModule is trained on pairs (inputs, labels): see "
                "set_batch_fn() to make them"
            )
        inputs, labels = tree_map(self._to_device, (item[0], item[1]))
        if isinstance(inputs, list):
            inputs = tuple(inputs)
        if self.settings.fp16.auto_cast and self.settings.fp16.enabled:
            inputs = tree_map(to_half, inputs)
        return inputs, labels

    def _to_device(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        here = value.detach()
        there = here.to(self.device, non_blocking=True)
        return there.clone() if there is here else there  # layers may change it in place

    def _print_progress(self) -> None:
        every, step = self.settings.steps_per_print, self._progress.global_steps
        if every and step % every == 0 and self.global_rank == 0:
            skipped, loss = self._progress.skipped_steps, float(self.agg_train_loss or 0.0)
            print(f"{step=}, {skipped=}, {loss=:.4f}, lr={self.get_lr()}, mom={self.get_mom()}", flush=True)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take batches from a loader from now on, from the beginning."""
        self.training_dataloader, self._data = loader, iter(loader) if self._reads_data else None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take batches from an iterator from now on."""
        self._data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Have `fn` make a pair (inputs, labels) of each item of the data."""
        self._batch_fn = fn

    @property
    def micro_batches(self) -> int:
        """Return the number of micro batches in a batch."""
        return self.settings.gradient_accumulation_steps

    @property
    def _last_place(self) -> int:
        return self.module.shape.owner(self.module.shape.num_stages - 1)

    def is_first_stage(self) -> bool:
        """Tell whether this rank has the first layers."""
        return self.module.shape.owner(0) == self.module.stage_id

    def is_last_stage(self) -> bool:
        """Tell whether this rank has the last layers, and the loss."""
        return self._last_place == self.module.stage_id

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layers of this rank's stages, each by itself.

        Errors: ConfigError if the schedule splits the backward, which compiled layers do not support
        """
        if self.module.shape.splits_backward:
            raise ConfigError(
                f"engine.compile() with the schedule {self.module.shape.schedule}: compiled layers cannot "
                "have their backward in two halves; take 1f1b, gpipe or interleaved"
            )
        super().compile(*args, **kwargs)

    def destroy(self) -> None:
        """Destroy the engine, and give up the groups of the stages."""
        super().destroy()
        self._axis.without_group()
        for neighbour in self._neighbours.values():
            neighbour.without_groups()


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(engine: StagesEngine, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse the call, and name the one to use instead.

        Errors: PipelineError
        """
        raise PipelineError(
            f"engine.{name}(): a model in stages has train_batch() and eval_batch() only, which run all of "
            "its micro batches"
        )

    refuse.__name__ = name
    return refuse


for _name in RUN_BY_THE_PROGRAM:
    setattr(StagesEngine, _name, _refusal(_name))
