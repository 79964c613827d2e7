"""A model as units: the collectives over all of them, in an order that is the same on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import nn

from ...comm.pending import Pending
from ...comm.rank_group import Job
from ...errors import ConfigError
from ...mesh.domain import Domains
from ...offload.offload import Offload
from ...placement.precision import Precision
from ...placement.stage_policy import Placement, Policy, UnitSizes
from ..access.access import Access
from ..access.module_parameters import keep_packed
from ..access.prefetch import KeepsValues, Prefetcher, in_backward
from ..gradients.replicated_gradients import ReplicatedGradients
from ..parameters.packed import PackedOf, find_packed, parts_of
from ..parameters.param_shard import holder_of
from ..parameters.param_status import detach
from ..parameters.shared_memory import warn_of_kept_views
from ..parameters.sub_buffer_plan import Member
from ..parameters.writes import ComparisonTurns
from ..units.beside_units import place_beside_units
from ..units.make_units import make_units, members_of
from ..units.partition import IsLeaf, cut_into_units, parameters_here
from ..units.sub_buffer import SubBuffer
from ..units.unit import Unit, UnitState
from .offload_kinds import OffloadStateTypeEnum
from .parked_states import ParkedStates
from .reducer import make_reducer
from .trainer import Trainer

TRAINED_DTYPES = (torch.float32, torch.bfloat16)


class ShardedModel:
    """The units of a module, built in place.

    Order: every rank must construct it and call its methods in the same order; units go in definition order,
           which does not depend on what a rank's data made the model compute
    """

    def __init__(  # noqa: PLR0913
        self,
        module: nn.Module,
        *,
        policy: Policy,
        groups: Sequence[Sequence[torch.Tensor]],
        precision: Precision,
        unit_sizes: UnitSizes,
        is_leaf: IsLeaf,
        device: torch.device,
        domains: Domains,
        offload: Offload,
        trainer: Trainer | None = None,
        loses_writes: bool = False,
        settings: Mapping[str, Any] | None = None,
        groups_apart: frozenset[int] = frozenset(),
    ) -> None:
        """Cut `module` into units; `groups` are the optimizer's, some of which lie apart (see
        `Rule.groups_apart`), `settings` what else all ranks must have in common, by name.

        A dtype that is None keeps what each parameter or buffer has.

        `loses_writes`: to write to gathered parameters without a modifier_rank is no error, see
        GatheredParameters.

        Errors: ConfigError if the ranks hold different models or settings, or a trained parameter has a
                dtype we cannot train
        """
        self.policy, self.device = policy, device
        self.domains, self.job = domains, domains.job
        self.loses_writes, self.has_lost_writes = loses_writes, False  # as in zero.Init
        self.has_left_out = False
        self._trainer = trainer or Trainer()
        self.on_taken = self._trainer.on_taken
        self._module = module
        _check_no_complex(module)
        packed = find_packed(module, device=device)
        # by name: what packed parameters have whole, which a load writes into
        self.packed_whole = {name: value for one in packed.values() for name, value in one.whole.items()}
        plans = cut_into_units(module, sizes=unit_sizes, is_leaf=is_leaf)
        if self.job.is_first:
            warn_of_kept_views(module.named_modules(), parameters_here(module))
        group_of = {id(param): index for index, group in enumerate(groups) for param in group}
        members = [members_of(plan, group_of, packed, groups_apart=groups_apart) for plan in plans]
        _check_trained_dtypes(members, precision.parameters)
        _check_agreement(members, self.job, settings or {})
        _ask_holders(module, packed)
        for param in module.parameters():
            domains.join(param, (part for _, part in parts_of(packed, param)))
        self.units = make_units(
            plans,
            members,
            policy=policy,
            sizes=unit_sizes,
            precision=precision,
            device=device,
            domains=domains,
            offload=offload,
        )
        sub_buffers = [sub_buffer for unit in self.units for sub_buffer in unit.sub_buffers]
        self.prefetcher = Prefetcher(self.units, after_evaluation=lambda: self._trainer.after_evaluation())
        is_any_sharded = self.has_shards
        if is_any_sharded and domains.together is None:
            self.prefetcher.let_ranks_differ(domains.holders, device)
        self._access = Access(module, self.units, self.prefetcher, keeps=self) if is_any_sharded else None
        if packed:
            keep_packed(module)
        place_beside_units(module, packed, device=device, domains=domains, precision=precision)
        self.trained = tuple(sub_buffer for sub_buffer in sub_buffers if sub_buffer.is_trained)
        self._asked_for: frozenset[int] = frozenset()  # ids of the parameters that it is about to take
        for sub_buffer in sub_buffers:
            if sub_buffer.is_trained or sub_buffer.is_sharded:
                params = sub_buffer.param_shard
                params.owner = weakref.ref(self)
                params.on_taken = partial(_call, weakref.WeakMethod(self._let_go))
        self._reducer = make_reducer(self.units, domains, ends_step=self._trainer.ends_step)
        self._copied = tuple(sub_buffer for sub_buffer in sub_buffers if sub_buffer.has_copies)
        self._turns = ComparisonTurns([sub_buffer.param_shard.writes for sub_buffer in self._copied])
        self.parked_states = ParkedStates(sub_buffers)

    @property
    def is_sharded(self) -> bool:
        """True if this rank keeps no more of any parameter than its shard."""
        return all(sub_buffer.is_sharded for unit in self.units for sub_buffer in unit.sub_buffers)

    @property
    def has_shards(self) -> bool:
        """True if some parameters are sharded."""
        return any(unit.is_sharded for unit in self.units)

    @property
    def num_small(self) -> int:
        """Number of elements of small parameters, which stay whole where the stage shards parameters
        over several ranks.
        """
        if self.policy.parameters is not Placement.SHARDED or self.domains.dense.comm.mesh.shard.is_alone:
            return 0
        sub_buffers = (
            sub_buffer for unit in self.units for sub_buffer in unit.sub_buffers if not sub_buffer.is_sharded
        )
        return sum(member.param.numel() for sub_buffer in sub_buffers for member in sub_buffer.members)

    def before_change(self) -> None:
        """Prepare for a change of shards, masters or states by anything but a step."""
        self.prefetcher.drop_kept()
        self._trainer.before_change()

    def before_gather(self) -> None:
        """Prepare for a gather of parameters for the program, not for the model.

        Order:  a collective
        Errors: ConfigError where ranks may be at different places of the program
        """
        self._check_together("a save, a load, a pass over weights or a move of states")
        self.prefetcher.drop_kept()
        self._trainer.before_gather()

    def _check_together(self, what: str) -> None:
        if self.prefetcher.is_in_lockstep:
            raise ConfigError(
                f'{what} inside engine.generating(weights="units"), where each rank goes at its own pace: '
                "leave the block first"
            )

    def hide_gradients_as_none(self) -> None:
        """Let `p.grad` be None, as in DeepSpeed, where it would be an AbsentGradient."""
        for sub_buffer in self.trained:
            if isinstance(sub_buffer.gradients, ReplicatedGradients):
                sub_buffer.gradients.hide_as_none()

    def begin_forward(self) -> None:
        """Prepare for the engine's forward; a checkpoint may compute it again in a backward."""
        if not in_backward():
            self._reducer.begin_forward()

    def begin_backward(self) -> None:
        """Make everything ready for gradients.

        Errors: ConfigError if the user did something to `p.grad` that has no meaning, and where ranks may be
                at different places of the program
        """
        self._check_together("engine.backward()")
        if not self._reducer.is_coalescing:
            self._adopt_gradients()
        self.prefetcher.begin_backward()
        self._reducer.begin_backward()

    def end_backward(self) -> None:
        """Note that autograd has come to its end."""
        self.prefetcher.end_backward()
        self._reducer.end_backward()

    def end_step(self) -> None:
        """Set the gradients, which have been used, to zero, and keep of sharded parameters
        nothing but the shards.
        """
        self.prefetcher.end_step()
        self.zero_gradients()
        self._reducer.end_step()

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        self._reducer.forget()
        for sub_buffer in self.trained:
            sub_buffer.gradients.zero()
        for unit in self.units:
            for sub_buffer in unit.sub_buffers:
                if not sub_buffer.is_trained:
                    for member in sub_buffer.members:
                        member.param.grad = None

    def finish_gradients(self) -> None:
        """Let each rank's shard of the gradients be the average over all ranks.

        Errors: as begin_backward
        """
        self._adopt_gradients()
        self._reducer.finish()

    @property
    def is_behind(self) -> bool:
        """True if gradients came after this rank had averaged them, so that `catch_up`
        is due on all ranks.
        """
        return self._reducer.is_behind

    def settle(self) -> None:
        """Let gradients be the averages of all gradients of the backwards, late ones included, if they are
        averages on any rank.

        Order: a collective
        """
        self._reducer.settle()

    def catch_up(self) -> None:
        """Average the late gradients of any rank.

        Order: a collective
        """
        self._reducer.catch_up()

    def coalesced(self) -> AbstractContextManager[None]:
        """Average the gradients of all backwards inside once, at the end.

        Order: a collective at the end
        """
        return self._reducer.coalesced()

    def average_gradients(self) -> None:
        """Let every `p.grad` be the average, where ranks hold whole gradients.

        Order: a collective
        """
        self.check_averaged()
        self._adopt_gradients()
        self._reducer.average_all()

    def check_averaged(self) -> None:
        """Check that gradients are averages.

        Errors: ConfigError inside `coalesced`
        """
        if self._reducer.is_coalescing:
            raise ConfigError(
                "gradients are each rank's own inside engine.coalesce_grad_reduction(), until its end; read "
                "or set them after the block"
            )
        self._reducer.end_failed()

    def publish(self, sub_buffer: SubBuffer) -> Pending:
        """Begin to give every rank the parameters that it holds and others' optimizers have updated."""
        sub_buffer.param_shard.note_change(
            index
            for index in range(len(sub_buffer.members))
            if index not in sub_buffer.optimizer_shard.frozen
        )
        if sub_buffer.is_sharded:
            return sub_buffer.comm.all_gather_chunk(sub_buffer.param_shard.kept, what=sub_buffer.label)
        return sub_buffer.comm.all_gather_(sub_buffer.param_shard.values.flat, what=sub_buffer.label)

    @contextmanager
    def gathered(
        self, units: Sequence[Unit] | None = None, *, keeps: KeepsValues | None = None
    ) -> Iterator[None]:
        """Have the parameters of these units, default all, here. `keeps`: see prefetch.py.

        Order:  a collective
        Errors: ConfigError while parameters are offloaded
        """
        self.parked_states.check_here("what reads parameters", (OffloadStateTypeEnum.lp_params,))
        self._trainer.before_gather()
        with self.prefetcher.held(self.units if units is None else units, keeps):
            yield

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Let each rank run what forwards without gradients it likes inside.

        Order:  a collective at each gather and at the end
        Errors: ConfigError while parameters are offloaded
        """
        self.parked_states.check_here("what reads parameters", (OffloadStateTypeEnum.lp_params,))
        self.before_gather()
        with self.prefetcher.in_lockstep(self.domains.holders, self.device):
            yield

    def take_edits(self) -> None:
        """Take over, in shards and float32 masters, what was written to parameters from outside."""
        self.before_change()
        for unit in self.units:
            for sub_buffer in unit.sub_buffers:
                sub_buffer.take_edits()
                if sub_buffer.is_sharded:  # otherwise the program's writes are counted
                    sub_buffer.param_shard.note_change()

    def take_writes(self) -> None:
        """Take over what the program has written to parameters that are here, before the optimizer updates
        what they are copies of.
        """
        self.prefetcher.drop_kept()
        self._turns.go_on()
        for sub_buffer in self._copied:
            sub_buffer.take_writes()
            if sub_buffer.is_sharded:  # whole parameters are from before the step
                sub_buffer.param_shard.writes.forget()

    def forget_writes(self, units: Iterable[Unit]) -> None:
        """Let writes to these parameters not count, where they are sharded, so that they go with the values,
        and no forward is under way that may have made them.
        """
        for unit in units:
            if not unit.num_forwards:
                for sub_buffer in unit.sub_buffers:
                    if sub_buffer.is_sharded:
                        sub_buffer.param_shard.writes.forget()

    def saved_values(self) -> AbstractContextManager[object]:
        """Have autograd save the places of sharded parameters that are used inside,
        instead of their values.
        """
        return nullcontext() if self._access is None else self._access.saved_values()

    def reshard_idle(self) -> None:
        """Keep of sharded parameters nothing but the shards, where no more is used."""
        self.prefetcher.reshard_idle()

    def offload(self, kinds: Sequence[OffloadStateTypeEnum], *, pin_memory: bool, non_blocking: bool) -> None:
        """Move these states to host memory until `reload`.

        Errors: ConfigError while sharded parameters are in use
        """
        self.before_gather()
        self.before_change()
        self.reshard_idle()
        self._reducer.end_failed()
        self._check_unused("offload_states()")
        self.parked_states.move_out(kinds, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload(self, *, non_blocking: bool = False) -> None:
        """Bring the offloaded states back."""
        self.parked_states.move_in(non_blocking=non_blocking)

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compile the module: as a whole, or, where parameters are sharded, the forward of each block.

        Errors: ConfigError if there is no block to compile
        """
        if self._access is None:
            self._module.compile(**options)
        elif not self._access.compile(options):
            raise ConfigError(
                "engine.compile(): the model has no block whose parameters are gathered together, as "
                "children of a ModuleList are; compile functions inside its forward, or use stage 0, 1 or 2"
            )

    def unshard_until_end(self, unit: Unit) -> None:
        """Have this unit here until the forward that is under way ends."""
        self.prefetcher.unshard_until_end(unit)

    def release(self) -> None:
        """Free gradients and masters; every rank has all parameters from then on.

        Order: a collective where parameters are sharded
        """
        if self.parked_states.is_taken:  # the memory and the hooks are the other engine's
            return
        self.reload()
        if self._access is not None:
            self.prefetcher.forget_forwards()
            self._access.release()
            self.prefetcher.hold_all()
        for member in (
            member for unit in self.units for sub_buffer in unit.sub_buffers for member in sub_buffer.members
        ):
            detach(member.param)
        self._reducer.release()
        for sub_buffer in self.trained:
            sub_buffer.release()
        for sub_buffer in (sub_buffer for unit in self.units for sub_buffer in unit.sub_buffers):
            sub_buffer.param_shard.restore_all()
        self.trained = ()
        self._trainer = Trainer()  # an engine's trainer holds process groups
        self.parked_states.is_given_up = True

    def prepare_to_give(self, asked_for: frozenset[int]) -> None:
        """Another engine is about to take over the parameters with these ids: have them as they are when all
        that was begun has ended.

        Order:  a collective
        Errors: ConfigError while sharded parameters are in use
        """
        if self.parked_states.is_taken or self.parked_states.is_given_up or asked_for == self._asked_for:
            return
        self._asked_for = asked_for
        self.reload()
        self.before_gather()
        self.before_change()
        self.reshard_idle()
        self._check_unused("initialize() of a model of another engine")

    def check_not_gathered(self, what: str) -> None:
        """Errors: ConfigError where a block holds whole parameters, which it would write back, or lose"""
        held = self.prefetcher.held_in_block
        if held is not None:
            raise _is_gathered(what, held)

    def _check_unused(self, what: str) -> None:
        used = [unit for unit in self.units if unit.is_sharded and unit.state is not UnitState.FREED]
        if used:
            raise _is_gathered(what, used[0])

    def _let_go(self) -> None:
        """Give up all that this engine has of parameters that another engine takes over. The
        program has those that the other engine does not take.

        Order: a collective where parameters are sharded
        """
        if self.parked_states.is_taken or self.parked_states.is_given_up:
            return
        self._end_training()
        for sub_buffer in (sub_buffer for unit in self.units for sub_buffer in unit.sub_buffers):
            sub_buffer.param_shard.give_back(self._asked_for)

    def take_out(self, by: str) -> None:
        """Let go of all parameters, whose values come from elsewhere: `by` gives them. Not a collective."""
        self.reload()
        self.before_change()
        self.parked_states.taken_out_by = by
        self._end_training()
        for sub_buffer in (sub_buffer for unit in self.units for sub_buffer in unit.sub_buffers):
            for member in sub_buffer.members:
                detach(member.param)
            sub_buffer.param_shard.drop()

    def _end_training(self) -> None:
        """Remove all hooks and nets from the module, and all that only training needs."""
        self.parked_states.is_taken = True
        self._reducer.release()
        if self._access is not None:
            self.prefetcher.forget_forwards()
            self._access.release()
        trainer, self._trainer = self._trainer, Trainer()
        trainer.before_end()
        for sub_buffer in self.trained:
            sub_buffer.release()
        self.trained = ()

    def _adopt_gradients(self) -> None:
        for sub_buffer in self.trained:
            sub_buffer.adopt_gradients()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call the method, if its object is alive; the holder of the weak reference does not keep it alive."""
    alive = method()
    if alive is not None:
        alive()


def _ask_holders(module: nn.Module, packed: PackedOf) -> None:
    """Tell the engines that have parameters of this module that they are about to be taken over."""
    params = tuple(module.parameters())
    params += tuple(part for param in params for _, part in parts_of(packed, param))
    asked_for = frozenset(map(id, params))
    for owner in dict.fromkeys(holder.owner() for holder in map(holder_of, params) if holder is not None):
        if owner is not None:
            owner.prepare_to_give(asked_for)


def _check_no_complex(module: nn.Module) -> None:
    """Refuse complex parameters: flat buffers hold real numbers, so one would stay as it is."""
    for name, param in module.named_parameters():
        if param.is_complex() and param.requires_grad:
            raise ConfigError(
                f"parameter '{name}' is {param.dtype}; trained parameters are float32 or bfloat16: hold it "
                "as float32, as torch.view_as_real() gives it, and call torch.view_as_complex() in the "
                "forward, or freeze it"
            )


def _check_trained_dtypes(units: Iterable[Sequence[Member]], param_dtype: torch.dtype | None) -> None:
    for member in (member for members in units for member in members if member.is_trained):
        dtype = param_dtype or member.param.dtype
        if dtype not in TRAINED_DTYPES and dtype != param_dtype:
            raise ConfigError(
                f"parameter '{member.name}' is {dtype}; trained parameters are float32 or bfloat16: convert "
                "the model before initialize(), or set bf16.enabled or fp16.enabled"
            )


def _check_agreement(units: Iterable[Sequence[Member]], job: Job, settings: Mapping[str, Any]) -> None:
    """Compare the ranks' models: different ones would wait for each other for ever, or train nonsense."""
    text = "\n".join(
        f"{member.name} {tuple(member.param.shape)} {member.param.dtype} {member.is_trained} {member.group}"
        for members in units
        for member in members
    )
    own = (crc32(text.encode()), dict(settings))
    everywhere = job.all_gather_objects(own, what="the fingerprint of the model")
    _, first = everywhere[0]
    for rank, (_, others) in enumerate(everywhere):
        differing = [key for key in {**first, **others} if first.get(key) != others.get(key)]
        if differing:
            key = differing[0]
            raise ConfigError(
                f"rank {rank} and rank 0 were given different settings: {key} is {others.get(key)} on rank "
                f"{rank} and {first.get(key)} on rank 0; give initialize() the same ds_config and optimizer "
                "on every rank"
            )
    different = job.first_difference([digest for digest, _ in everywhere])
    if different is not None:
        rank, leader = different
        raise ConfigError(
            f"rank {rank} and rank {leader} were given different models or optimizer groups: names, shapes, "
            "dtypes, requires_grad and groups of all parameters must agree; build the model the same way "
            "on every rank"
        )


def _is_gathered(what: str, unit: Unit) -> ConfigError:
    return ConfigError(
        f"{what} while the parameters of '{unit.name}' are gathered; leave GatheredParameters, "
        "engine.generating() or the forward first"
    )
