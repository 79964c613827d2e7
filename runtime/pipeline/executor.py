"""One rank's part of a batch: the actions of its row of the schedule's table, and the messages
between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..strided import is_strided, kind_of
from .messages import Contents, Described, IncomingMessage, Post
from .module import StagesModule
from .schedule import Action, Kind, Shape, Table
from .split_backward import Rest, backward_inputs


class _Message(NamedTuple):
    """A message from a stage to the next one, or, for a gradient, to the previous one."""

    is_gradient: bool
    stage: int  # the stage that sends it
    micro_batch: int

    def __str__(self) -> str:
        what = "the gradient of what came into" if self.is_gradient else "the output of"
        return f"{what} stage {self.stage}, micro batch {self.micro_batch}"


_Given = tuple[Contents, tuple[Tensor, ...]]


@dataclass(slots=True)
class _Live:
    """One micro batch in one stage, from its forward to the end of its backward."""

    inputs: tuple[Tensor, ...]  # inputs whose gradients are handed back
    outputs: tuple[Tensor, ...] = ()  # outputs for the next stage, or the loss
    grads: tuple[Tensor | None, ...] = ()
    rest: Rest | None = None

    def run_backward(self) -> None:
        """Run the whole backward."""
        if self.outputs:
            torch.autograd.backward(
                [
                    one if grad is None else _receive_gradient(one, grad)
                    for one, grad in zip(self.outputs, self.grads, strict=True)
                ]
            )


@dataclass(slots=True, kw_only=True)
class Batch:
    """Values that pass through the pipeline; a rank has those that it needs."""

    # by micro batch: micro batches have equal keys if shapes and types of all their inputs are equal
    keys: Sequence[int]
    inputs: Sequence[Any] = ()
    labels: Sequence[Any] = ()
    loss_factor: float = 1.0
    computes_loss: bool = True


@dataclass(slots=True)
class BatchOutcome:
    """Outcome of a batch, on the rank of the last stage."""

    losses: list[Tensor] = field(default_factory=list)
    more_losses: dict[str, list[Tensor]] = field(default_factory=dict)  # name -> losses that the module has
    outputs: list[Any] = field(default_factory=list)  # set where no loss is computed
    last_output: Any = None  # output of the last micro batch


class Executor:
    """Executor of one engine."""

    def __init__(self, module: StagesModule, post: Post) -> None:
        self.module, self.post = module, post
        # Contents that pass from a stage to the next, as this rank has sent or received them: by stage, key
        # of the micro batch, and whether gradients are wanted.
        self._told: dict[tuple[int, int, bool], Contents] = {}
        self._known: dict[tuple[int, int, bool], Contents] = {}

    def run(
        self,
        table: Table,
        batch: Batch,
        *,
        around_forward: Callable[[], AbstractContextManager[object]],
        around_backward: Callable[[], AbstractContextManager[object]],
    ) -> BatchOutcome:
        """Run this rank's actions, each inside the engine's context for it.

        Order:  all ranks of the pipeline call this, with the table of the same batch
        Errors: ConfigError for a value that a layer or the loss cannot hand on
        """
        run = _Run(self, table, batch, around_forward, around_backward)
        row = table[self.module.stage_id]
        for action, following in zip(row, [*row[1:], None], strict=True):
            run.do(action, following)
        self.post.finish()
        return run.outcome

    # ---- what is known of messages

    def note(self, stage: int, key: int, number: int, contents: Contents) -> bool:
        """Remember the contents that a stage hands on; return whether the next stage has to be told.

        Errors: ConfigError if equal inputs have led to other contents before
        """
        if self.module.dynamic_shape:
            return True
        place = (stage, key, torch.is_grad_enabled())
        before = self._told.setdefault(place, contents)
        if before is contents:
            return True
        if before != contents:
            raise ConfigError(
                f"stage {stage} hands on {contents} for micro batch {number}, and handed on {before} for "
                "inputs of the same shapes before: where shapes depend on values, build the model with "
                "PipelineModule(dynamic_shape=True)"
            )
        return False

    def known(self, stage: int, key: int) -> Contents | None:
        """Return the contents that the stage hands on, if this rank was told."""
        return self._known.get((stage, key, torch.is_grad_enabled()))

    def learn(self, stage: int, key: int, contents: Contents) -> None:
        """Remember contents that another rank has told this one."""
        if not self.module.dynamic_shape:
            self._known[stage, key, torch.is_grad_enabled()] = contents


class _Run:
    """Run of one batch."""

    def __init__(
        self,
        executor: Executor,
        table: Table,
        batch: Batch,
        around_forward: Callable[[], AbstractContextManager[object]],
        around_backward: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._executor, self._batch = executor, batch
        self._module, self._post = executor.module, executor.post
        self._shape, self._place = executor.module.shape, executor.module.stage_id
        self._last = self._shape.num_stages - 1
        self._around_forward, self._around_backward = around_forward, around_backward
        self._due = _incoming(table, self._place, self._shape)
        self._answers = _answers(table, self._place, self._shape)
        self._arrivals: dict[_Message, IncomingMessage] = {}
        self._handed: dict[_Message, _Given] = {}  # values from one stage of this rank to another
        self._live: dict[tuple[int, int], _Live] = {}
        self.outcome = BatchOutcome()

    def do(self, action: Action, following: Action | None) -> None:
        """Run one action, and begin to receive the inputs of the following one."""
        needed = self._needed(action)
        given = None if needed is None else self._take(needed)
        ahead = None if following is None else self._needed(following)
        if ahead is not None:
            self._fetch_ahead(ahead)
        if action.kind is Kind.FORWARD:
            with self._around_forward():
                self._forward(action.stage, action.micro_batch, given)
        else:
            with self._around_backward():
                grads = () if given is None else given[1]
                self._backward(action.kind, action.stage, action.micro_batch, grads)

    # ---- messages

    def _needed(self, action: Action) -> _Message | None:
        kind, stage, number = action
        if kind is Kind.FORWARD:
            return None if stage == 0 else _Message(False, stage - 1, number)
        if kind is Kind.WEIGHTS or stage == self._last or not self._wants_grads(stage, number):
            return None
        return _Message(True, stage + 1, number)

    def _wants_grads(self, stage: int, number: int) -> bool:
        """Tell whether gradients come back for the values that a stage of this rank handed on, as far as is
        known.
        """
        live = self._live.get((stage, number))
        return live is not None and any(one.requires_grad for one in live.outputs)

    def _take(self, message: _Message) -> _Given:
        if message in self._handed:
            return self._handed.pop(message)
        while message not in self._arrivals:
            self._fetch(self._shape.owner(message.stage))
        arrival = self._arrivals.pop(message)
        tensors = arrival.wait()
        self._post.finish(self._answers.get(message, ()))  # it has arrived, so nothing is waited for
        return arrival.contents, tensors

    def _fetch_ahead(self, message: _Message) -> None:
        """Begin to receive the message, unless another message from that rank must come first."""
        source = self._shape.owner(message.stage)
        due = self._due.get(source, deque())
        while message in due and self._is_known(due[0]):
            self._fetch(source)

    def _is_known(self, message: _Message) -> bool:
        if message.is_gradient:
            return (message.stage - 1, message.micro_batch) in self._live
        return self._executor.known(message.stage, self._batch.keys[message.micro_batch]) is not None

    def _fetch(self, source: int) -> None:
        """Begin to receive the next message of a rank."""
        message = self._due[source].popleft()
        if message.is_gradient:
            outputs = self._live[message.stage - 1, message.micro_batch].outputs
            if any(one.requires_grad for one in outputs):  # else no gradient comes back
                contents = Contents(True, tuple(_describe(one) for one in outputs if one.requires_grad))
                self._arrivals[message] = self._post.receive(source, contents, what=str(message))
            return
        key = self._batch.keys[message.micro_batch]
        known = self._executor.known(message.stage, key)
        arrival = self._arrivals[message] = self._post.receive(source, known, what=str(message))
        if known is None:
            self._executor.learn(message.stage, key, arrival.contents)

    def _send(self, message: _Message, stage: int, contents: Contents, tensors: Sequence[Tensor]) -> None:
        """Hand the tensors to a stage."""
        place = self._shape.owner(stage)
        if place == self._place:
            self._handed[message] = (contents, tuple(one.detach() for one in tensors))
            return
        number = message.micro_batch
        has_to_tell = not message.is_gradient and self._executor.note(
            message.stage, self._batch.keys[number], number, contents
        )
        self._post.send(place, tensors, contents=contents if has_to_tell else None, what=str(message))

    # ---- actions

    def _forward(self, stage: int, number: int, given: _Given | None) -> None:
        leaves: tuple[Tensor, ...] = ()
        if given is None:
            value = self._batch.inputs[number]
        else:
            contents, tensors = given
            if torch.is_grad_enabled():
                for tensor, described in zip(tensors, contents.tensors, strict=True):
                    tensor.requires_grad_(described.wants_grad)
                leaves = tuple(tensor for tensor in tensors if tensor.requires_grad)
                tensors = tuple(_enter(tensor) if tensor.requires_grad else tensor for tensor in tensors)
            value = tensors if contents.is_tuple else tensors[0]
        output = self._module.run_stage(stage, value)
        live = _Live(leaves)
        if stage == self._last:
            live.outputs = self._end(number, output)
        else:
            contents, live.outputs = _contents(output, stage)
            self._send(_Message(False, stage, number), stage + 1, contents, live.outputs)
        if torch.is_grad_enabled():
            self._live[stage, number] = live

    def _end(self, number: int, output: Any) -> tuple[Tensor, ...]:
        """Return the tensors at which the backward of a micro batch begins, on the last stage."""
        if number + 1 == len(self._batch.keys):
            self.outcome.last_output = output
        if not self._batch.computes_loss:
            self.outcome.outputs.append(output)
            return ()
        loss, loss_fn = output, self._module.loss_fn
        if loss_fn is not None:
            loss = loss_fn(output, self._batch.labels[number])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            said = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            who = "the last layer" if loss_fn is None else "loss_fn(outputs, labels)"
            raise ConfigError(
                f"{who} returns {said}; it must be a micro batch's loss, a tensor of one element"
            )
        self.outcome.losses.append(loss.detach().float().reshape(()))
        for name, value in (self._module.get_additional_losses() or {}).items():
            self.outcome.more_losses.setdefault(name, []).append(value.detach())
        if not torch.is_grad_enabled():
            return ()
        if not loss.requires_grad:
            raise ConfigError(
                "the loss has no gradient: no parameter leads to it; see that the layers and loss_fn compute "
                "it from what they are given, outside torch.no_grad()"
            )
        return ((loss.float() * self._batch.loss_factor).reshape(()),)

    def _backward(self, kind: Kind, stage: int, number: int, grads: tuple[Tensor, ...]) -> None:
        live = self._live[stage, number]
        if kind is Kind.WEIGHTS:
            del self._live[stage, number]
            if live.rest is None:
                live.run_backward()
            else:
                live.rest.run()
            return
        live.outputs = tuple(one for one in live.outputs if one.requires_grad)
        live.grads = grads if stage < self._last else (None,) * len(live.outputs)
        gradients: tuple[Tensor | None, ...] = ()
        if kind is Kind.BACKWARD:
            del self._live[stage, number]
            live.run_backward()
            gradients = tuple(one.grad for one in live.inputs)
        elif live.inputs:
            gradients, live.rest = backward_inputs(
                live.outputs, live.grads, live.inputs, self._module.parameters_of(stage)
            )
        if live.inputs:
            self._send_back(stage, number, live.inputs, gradients)

    def _send_back(
        self, stage: int, number: int, inputs: Sequence[Tensor], found: Sequence[Tensor | None]
    ) -> None:
        grads = [
            torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, found, strict=True)
        ]
        contents = Contents(True, tuple(map(_describe, grads)))
        self._send(_Message(True, stage, number), stage - 1, contents, grads)


def _incoming(table: Table, place: int, shape: Shape) -> dict[int, deque[_Message]]:
    """Return, by sending rank, the messages to this rank in the order in which they are sent."""
    messages: dict[int, deque[_Message]] = {}
    for source, row in enumerate(table):
        for kind, stage, number in row if source != place else ():
            is_forward = kind is Kind.FORWARD
            receiver = stage + 1 if is_forward else stage - 1
            if kind is Kind.WEIGHTS or not 0 <= receiver < shape.num_stages:
                continue
            if shape.owner(receiver) == place:
                messages.setdefault(source, deque()).append(_Message(not is_forward, stage, number))
    return messages


def _answers(table: Table, place: int, shape: Shape) -> dict[_Message, list[str]]:
    """Return, by each message to this rank, the messages of this rank that its sender has taken since the one
    before.
    """
    found: dict[_Message, list[str]] = {}
    for source, row in enumerate(table):
        taken: list[str] = []
        for kind, stage, number in row if source != place else ():
            if kind is Kind.WEIGHTS:
                continue
            is_forward = kind is Kind.FORWARD
            giver, receiver = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
            if 0 <= giver < shape.num_stages and shape.owner(giver) == place:
                taken.append(str(_Message(not is_forward, giver, number)))
            if 0 <= receiver < shape.num_stages and shape.owner(receiver) == place:
                found[_Message(not is_forward, stage, number)], taken = taken, []
    return found


def _contents(output: Any, stage: int) -> tuple[Contents, tuple[Tensor, ...]]:
    tensors = tuple(output) if isinstance(output, tuple | list) else (output,)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"stage {stage} returns {'' if tensor is output else 'a tuple with '}"
                f"{type(tensor).__name__}; between stages go a tensor or a tuple of tensors"
            )
        if not is_strided(tensor):
            raise ConfigError(
                f"stage {stage} returns {kind_of(tensor)}, which cannot be sent; between stages go dense "
                "tensors: return what it is made of, and make it again in the next stage"
            )
    return Contents(isinstance(output, tuple | list), tuple(map(_describe, tensors))), tensors


def _describe(tensor: Tensor) -> Described:
    return Described(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class _Enter(torch.autograd.Function):
    """Entry of a value from another rank, so that layers may change it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _enter(tensor: Tensor) -> Tensor:
    entered: Tensor = _Enter.apply(tensor)  # type: ignore[no-untyped-call]
    return entered


class _ReceiveGradient(torch.autograd.Function):
    """Begin of the backward of an output, with a gradient that has arrived.

    torch.autograd.backward(outputs, gradients) compares their shapes with symbolic ones, and loads 480
    modules for that.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return output.new_zeros((), dtype=torch.float32)  # the output may be complex

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def _receive_gradient(output: Tensor, grad: Tensor) -> Tensor:
    received: Tensor = _ReceiveGradient.apply(output, grad)  # type: ignore[no-untyped-call]
    return received
