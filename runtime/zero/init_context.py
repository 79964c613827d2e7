"""`with dslaunch.zero.Init():` a model that is made inside is sharded while it is made.

How the context follows a model's construction
----------------------------------------------
torch tells a hook of ours whenever a module registers a parameter or a module; nothing is patched. When one
is registered, the parameters that other modules registered before are sharded: so one module's own parameters
are whole at a time. Code that reads or writes one of those (an `__init__` that goes on after its children,
`self.apply(init)`) finds it whole all the same: every use of a placeholder comes by its `__torch_function__`,
which brings the values back and lets those go that were here. What has been here is sharded anew, since it
may have been written. So the end of an `__init__` need not be known; to wrap the `__init__` of all classes
would not do: it is the parents' code that writes to children.

Libraries go on after the context: they tie weights, resize, copy modules and write to `data`. Until
initialize() has the model, a use of a placeholder brings the values then, too, on all ranks together. Only
inside GatheredParameters(modifier_rank=...) it does not: there one rank may run alone.

Only memory that has an alias must stay, for the alias may be written to: `new.data.copy_(old.data)` brings
`old` while the alias of `new` is at hand. torch counts who uses a storage.

A parameter may be replaced, tied or deleted at any time, and its module, too. What is whole is held here, so
that it is sharded on every rank or on none. A parameter that only this context has is dropped instead. One
that no module has any longer is left alone until a module registers it again, at the end for good. Each rank
might count other references (garbage is collected at any time), so rank 0 decides the fate of each parameter,
see `_Fate`.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import count
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..comm.collectives import Collectives
from ..comm.mesh import make_mesh
from ..comm.process_group import choose_device, start_process_group
from ..comm.rank_group import Job
from ..config.source import read_source
from ..environment import computes_plainly, read_environment
from ..errors import ConfigError, show_user_errors_in_one_line
from ..mesh.mpu import read_mpu
from ..placement.stage_policy import Placement, policy_for_stage
from ..strided import is_strided
from . import ds_attributes
from .edit import Edit
from .param_location import location_of
from .parameters.early_parameter import EarlyParameter, InitContext, early_of
from .parameters.flat_buffer import num_users
from .parameters.shared_memory import first_sharing, is_expanded, warn_of_kept_views

_ConfigSource = str | os.PathLike[str] | Mapping[str, Any]
_NUMBERS = count()


class _Fate(IntEnum):
    """The fate of a parameter that is whole, when others are registered."""

    SHARDED = 0
    STAYS = 1  # stays whole, for its memory has an alias
    LEFT = 2  # left to itself: no module has it any longer


class Init:
    """Inside it, and with `module` at once, parameters get rank 0's values, and each rank keeps 1/N of each.

    They have their values while they are used inside, later in GatheredParameters, and as soon as
    `initialize()` has taken the model over, which it does unit by unit at stage 3. Buffers and integers stay
    as they are. Of contexts inside each other the outermost counts; when an inner one ends, what was made in
    it is sharded. A rank that is alone shards nothing.
    Order:  every rank must make the same model; all inside is a collective
    Errors: ConfigError for arguments that have no meaning here
    Source: DeepSpeed 0.19.8 runtime/zero/partition_parameters.py, `Init`
    """

    loses_writes = (
        False  # True allows writes to gathered parameters without a modifier_rank, see GatheredParameters
    )

    def __init__(  # noqa: PLR0913  (DeepSpeed's signature)
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: _ConfigSource | None = None,
        config: _ConfigSource | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object | None = None,
        zero_param_parallel_group: object | None = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: object | None = None,
        param_swapper: object | None = None,
    ) -> None:
        """`dtype` is what parameters become; None keeps theirs, since it is initialize() that rounds to a
        ds_config's precision.

        It has no effect with a ds_config whose stage keeps parameters whole. `mem_efficient_linear` has
        nothing to choose: torch's own linear keeps no copies here. Shards lie in host memory if the ds_config
        offloads parameters, or `remote_device` is "cpu"; it is initialize() that brings them to a disk.
        Parameters are sharded over all ranks, so the groups may be of all ranks only, and what `mpu` says is
        compared by initialize().
        """
        section = _zero_section(config_dict_or_path, config)
        # the plain run of `dslaunch numerics` has the whole model on every rank
        self.is_enabled = enabled and _asks_for_sharding(section) and not computes_plainly()
        if section is not None and section.get("enable_sanity_checks") is True:
            self.loses_writes = False
        self.has_lost_writes = False  # True once a warning has said so
        self.has_left_out = False
        self.number = next(_NUMBERS)
        self._serials = count()
        self._depth = 0
        self._hooks: list[Any] = []
        # parameters to be sharded, held so that no rank's can die; None for a moment, while that is found out
        self._whole: dict[EarlyParameter, nn.Parameter | None] = {}
        self._made: weakref.WeakSet[EarlyParameter] = weakref.WeakSet()
        self._made_on_meta: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._edits: list[Edit] = []  # GatheredParameters with a modifier_rank that are open
        self._outer: InitContext | None = None  # the context around this one
        # the outer context has the parameters that are made in here
        self._made_for_outer: weakref.WeakSet[EarlyParameter] = weakref.WeakSet()
        if not self.is_enabled:
            return
        show_user_errors_in_one_line()
        worker = read_environment()
        start_process_group(worker)
        self.device = choose_device(worker)
        self.keeps_on_host = self.device.type != "cpu" and _is_offloaded(section, remote_device)
        self.dtype = dtype
        if mpu is not None:
            read_mpu(mpu, call="zero.Init")
        _check_arguments(
            remote_device=None if remote_device in ("none", "cpu", self.device.type) else remote_device,
            data_parallel_group=None if _is_of_all(data_parallel_group) else data_parallel_group,
            pin_memory=pin_memory,
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            sequence_data_parallel_group=(
                None if _is_of_all(sequence_data_parallel_group) else sequence_data_parallel_group
            ),
            param_swapper=param_swapper,
        )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(
                f"zero.Init(dtype={dtype}): must be a floating-point dtype of torch, or left out"
            )
        self.comm = Collectives(make_mesh(shard_size=dist.get_world_size()))
        self.job = Job(self.comm.wire)
        self._num_users = num_users(nn.Parameter(torch.empty(1, device="cpu")))
        if module is not None:
            for name, param in module.named_parameters():
                self.note(param, name)
            self._shard_rest()

    def __enter__(self) -> None:
        if self.is_enabled and self._depth == 0:
            self._hooks = [
                torch_module.register_module_parameter_registration_hook(self._see_parameter),
                torch_module.register_module_buffer_registration_hook(self._see_buffer),
                torch_module.register_module_module_registration_hook(self._see_module),
            ]
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth or not self.is_enabled:
            return
        for hook in self._hooks:
            hook.remove()
        outer, self._outer = self._outer, None
        try:
            if kind is None:
                if outer is not None:
                    outer.shard_among(self._made_for_outer)
                self._shard_rest()
        finally:
            # parameters of an __init__ that has failed; no other rank may know of it
            for early in list(self._whole):
                early.forget()

    def note(self, param: nn.Parameter, name: str, owner: nn.Module | None = None) -> None:
        """Shard this parameter soon, unless it is sharded, an engine's, or nothing that we could shard."""
        other = early_of(param)
        if other is not None and other.init is not self:
            self._outer = other.init
            self._made_for_outer.add(other)
        is_known = other is not None or location_of(param) is not None
        is_plain = type(param) is nn.Parameter and is_strided(param) and param.is_floating_point()
        if is_plain and not is_known and param.numel() and not is_expanded(param):
            early = EarlyParameter(param, name, self, owner, serial=next(self._serials))
            self._whole[early] = param
            self._made.add(early)
        elif other is not None and owner is not None:
            other.note_owner(owner)

    def unshard_for(self, tensors: Iterable[Any], *, is_use: bool) -> None:
        """Have those among these here that this context has sharded, if it is open; after it, and while one
        rank may run alone, only for a use.

        Order: a collective if it is
        """
        if not is_use and (self._depth == 0 or self._edits):
            return
        known = [early_of(one) for one in tensors if isinstance(one, Tensor)]
        wanted = dict.fromkeys(one for one in known if one is not None and one.init is self)
        if self._edits:
            self._edits[-1].use(wanted)
            return
        self._shard([early for early in self._whole if early not in wanted])
        for early in wanted:
            if not early.is_whole:
                early.use()
                self._whole[early] = early.param

    @contextmanager
    def edited_by(self, rank: int, params: Sequence[EarlyParameter]) -> Iterator[None]:
        """Let this rank run alone meanwhile: see edit.py. Whoever has these parameters takes its values over;
        others that are whole may be written as well, without a word.

        Order: a collective at both ends
        """
        self._shard([early for early in self._whole if early not in params])
        for early in self._whole:
            early.spread(0)
        edit = Edit(rank, self.job, device=self.device, find=self._of_serial, is_idle=self._is_idle)
        self._edits.append(edit)
        try:
            yield
            for early in edit.end():
                self._whole[early] = early.param
            for early in self._whole:
                if early not in params:
                    early.spread(rank)
        finally:
            self._edits.remove(edit)

    def use_in_edit(self, params: Sequence[EarlyParameter], rank: int | None) -> bool:
        """Have these here, if one rank may run alone already, and `rank` is no other one whose values are to
        count; False if not.

        Order:  a collective if it is True; of a rank that runs alone, by its edit
        Errors: ConfigError if this rank is alone, and another one may be
        """
        edit = self._edits[-1] if self._edits else None
        if edit is None or rank not in (None, edit.rank):
            return False
        edit.use(params)
        for early in params:
            if not early.is_whole:
                raise ConfigError(
                    f"parameter '{early.name}' is gathered on this rank alone, inside "
                    f"GatheredParameters(modifier_rank={edit.rank}): gather it there on rank {edit.rank}, or "
                    "outside"
                )
        return True

    def spread_in_edit(self, params: Sequence[EarlyParameter]) -> None:
        """Take the values that the rank which may run alone has written to these parameters.

        Order: a collective, by its edit
        """
        self._edits[-1].spread(params)

    def shard_among(self, made: Container[EarlyParameter]) -> None:
        """Shard the parameters of `made` that are whole and not in use.

        Order: a collective
        """
        self._shard([early for early in self._whole if early in made])

    def let_go(self, early: EarlyParameter) -> None:
        """Forget a parameter that others have now."""
        self._whole.pop(early, None)
        self._made.discard(early)

    def describe(self, early: EarlyParameter) -> None:
        """Attach the attributes by which DeepSpeed's callers know the parameter."""
        axis = self.comm.mesh.shard
        ds_attributes.attach(early.param, shard=early.own_values, is_sharded=not axis.is_alone, axis=axis)

    def _see_parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        self._shard([early for early in self._whole if not early.is_owned_by(module)])
        if param.is_meta:
            self._made_on_meta.add(module)
        self.note(param, f"{type(module).__name__}.{name}", module)

    def _see_buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        """Keep a parameter whole for good if it becomes a buffer."""
        early = None if buffer is None else early_of(buffer)
        if early is not None and early.init is self:
            if not early.is_whole:
                early.use()
            early.forget()

    def _see_module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        for owner in module.modules() if module is not None and self._made_on_meta else ():
            if owner in self._made_on_meta:
                self._see_filled(owner)
        self._shard(list(self._whole))

    def _see_filled(self, module: nn.Module) -> None:
        """Note what to_empty(), which skip_init() calls, has put in without registering it."""
        for name, param in module._parameters.items():
            if param is not None and not param.is_meta and early_of(param) is None:
                self.note(param, f"{type(module).__name__}.{name}", module)

    def _shard(self, wanted: Iterable[EarlyParameter]) -> None:
        """Shard these, but what is in use: see "How the context follows a model's construction"."""
        idle = [early for early in wanted if early in self._whole and not early.is_held]
        if not idle:
            return
        fates = self._decide()
        for early, fate in fates.items():
            if fate is _Fate.LEFT:
                early.forget()
        for early in idle:
            if fates[early] is _Fate.SHARDED:
                early.keep_shard()
                del self._whole[early]

    def _shard_rest(self) -> None:
        fates = self._decide(checks_aliases=True)
        if self.job.is_first:
            for early in fates:
                if not early.is_dead and not self._is_idle(early):
                    warn_of_kept_views((("", owner) for owner in early.owners), {early.name: early.param})
        for early, fate in fates.items():
            if fate is _Fate.LEFT:
                early.forget()
                continue
            early.keep_shard()
            del self._whole[early]
        self._release_unregistered()
        if self.dtype is not None:  # only at the end: an __init__ may mix them with tensors of its own
            for early in self._made:
                if not early.is_dead:
                    early.convert(self.dtype)

    def _release_unregistered(self) -> None:
        """Let parameters that no module has any longer be plain tensors, for no engine will have them."""
        if any(early.is_lost for early in self._made):
            gc.collect()  # a parameter that was replaced may be garbage
        lost = [early.serial for early in self._made if early.is_lost]
        decided = self.job.all_gather_objects(sorted(lost), what="parameters that no module has")[0]
        if not decided:
            return
        here = {early.serial: early for early in self._made if not early.is_dead}
        known = [serial for serial in decided if serial in here]
        everywhere = self.job.all_gather_objects(known, what="parameters that no module has")
        for serial in decided:
            if all(serial in one for one in everywhere):
                here[serial].use()
                here[serial].forget()

    def _decide(self, *, checks_aliases: bool = False) -> dict[EarlyParameter, _Fate]:
        """Decide the fate of each parameter that is whole and is not being read; the same on every rank.

        Errors: ConfigError if two of them share their memory, and `checks_aliases`
        """
        idle = [early for early in self._whole if not early.is_held]
        # fates, and a pair that shares memory
        decided = torch.zeros(len(idle) + 2, dtype=torch.int64, device=self.device)
        if self.job.is_first:
            self._drop_dead(idle)
            pair = _sharing(idle) if checks_aliases else None
            if pair is not None:  # a parameter that was replaced may be garbage that has not been collected
                gc.collect()
                self._drop_dead(idle)
                pair = _sharing(idle)
            decided.copy_(torch.tensor([*map(self._fate, idle), *(pair or (0, 0))], device="cpu"))
        self.comm.broadcast(decided, what="parameters in use")
        *fates, one, other = decided.tolist()
        if one != other:
            raise ConfigError(
                f"parameters '{idle[one].name}' and '{idle[other].name}' share their storage but are two "
                "objects; tie them by assigning one nn.Parameter to both modules"
            )
        return dict(zip(idle, map(_Fate, fates), strict=True))

    def _drop_dead(self, idle: Iterable[EarlyParameter]) -> None:
        """Let go of parameters that only this context holds."""
        for early in idle:
            self._whole[early] = None
            self._whole[early] = None if early.is_dead else early.param

    def _fate(self, early: EarlyParameter) -> _Fate:
        if early.is_dead or early.is_replaced:
            return _Fate.LEFT
        return _Fate.SHARDED if self._is_idle(early) else _Fate.STAYS

    def _is_idle(self, early: EarlyParameter) -> bool:
        """Whether nothing else lies in its memory."""
        return num_users(early.param) <= self._num_users

    def _of_serial(self, serial: int) -> EarlyParameter:
        return next(early for early in self._made if early.serial == serial)


def _zero_section(*configs: _ConfigSource | None) -> Mapping[str, Any] | None:
    """Return what the ds_config says of ZeRO; None if there is no ds_config."""
    given = [one for one in configs if one is not None]
    if len(given) > 1:
        raise ConfigError("zero.Init: config_dict_or_path and config are both given; give the ds_config once")
    if not given:
        return None
    _, values = read_source(given[0])
    section = values.get("zero_optimization")
    return section if isinstance(section, dict) else {}


def _asks_for_sharding(section: Mapping[str, Any] | None) -> bool:
    """True if the section asks for sharding. The rest of it is initialize()'s to judge; a trainer may still
    have to fill in parts of it.
    """
    if section is None:
        return True
    try:
        policy = policy_for_stage(section.get("stage", 0))
    except ValueError:
        return False
    return policy.parameters is Placement.SHARDED


def _is_offloaded(section: Mapping[str, Any] | None, remote_device: str | None) -> bool:
    """Tell whether the section or the argument has parameters lie outside of the device between their uses;
    initialize() judges the rest of the section.
    """
    offload = (section or {}).get("offload_param")
    is_asked = isinstance(offload, Mapping) and offload.get("device") in ("cpu", "nvme")
    return is_asked or remote_device == "cpu"


def _is_of_all(group: object) -> bool:
    """Whether it is a process group of all ranks, as Megatron makes one where only data is divided."""
    return isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) == dist.get_world_size()


def _check_arguments(**given: object) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise ConfigError(f"zero.Init({name}={value!r}) is not available in this version; leave it out")


def _sharing(params: Sequence[EarlyParameter]) -> tuple[int, int] | None:
    """Return the places of two parameters that share their memory, and are no garbage: what uses memory of
    others is whole until the end.
    """
    places = [place for place, early in enumerate(params) if not early.is_dead and not early.is_replaced]
    pair = first_sharing([params[place].param for place in places])
    return None if pair is None else (places[pair[0]], places[pair[1]])
