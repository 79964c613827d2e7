"""Parameters are unsharded when they are used: four nets, each of which catches what the others let through.

1. Modules. The forward of every module unshards its unit, unless one of the same unit is under way. This is
   the usual way; it serves modules that are called past the one that owns them, and checkpoints that compute
   a part of a unit again.
2. Outputs. A gradient that reaches what a unit returned unshards the unit, before its own operations run.
3. Saved values. What autograd saves of a unit's memory is noted as a place in it, and read again when it is
   needed: so the memory may go meanwhile, and operations that no output leads to (views changed in place,
   tensors in objects) find it.
4. Uses. A parameter that is used outside its module while a forward or a backward runs unshards its unit,
   however it came there: as `module.weight`, in a list or in a function that a checkpoint computes again.

Nets 2 and 3 gather the values only: autograd reads them where they lie. A parameter that a hook of the
backward uses has them from then on, see freed_parameter.py.
Nothing of this is installed where no parameter is sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ...errors import ConfigError
from ..parameters.flat_buffer import address_of
from ..parameters.wrapped import name_in_state_dicts
from ..units.sub_buffer import SubBuffer
from ..units.unit import Unit
from ..units.unit_uses import UnitUse
from .library_graphs import watch_libraries
from .module_forward import NOT_EXPORTED, ModuleForward
from .module_parameters import parameters_of, plain_again
from .prefetch import Prefetcher, in_backward
from .saved_hooks import Pack, Unpack, top_hooks

_PLAIN = (Tensor, nn.Parameter)
_CHECKPOINTS = "torch.utils.checkpoint"  # its hooks keep nothing, and compute the values again
_COMPILED = "torch._dynamo.eval_frame"  # the module of the class that torch.compile() gives a module
_REFUSES_HOOKS = "don't yet support saved tensor hooks"  # torch.func, of net 3


class _SavedView(NamedTuple):
    """A saved tensor in a unit's memory."""

    unit: Unit
    sub_buffer: SubBuffer
    member: int  # the index of the parameter in `sub_buffer`
    num_changes: int  # changes of that parameter until then
    use: UnitUse | None
    # Size, stride and offset; None if it is the parameter as it is, which has a view already.
    place: tuple[torch.Size, tuple[int, ...], int | torch.SymInt] | None


class _SavedParts(NamedTuple):
    """A saved tensor that consists of others, a DTensor for example: each of these as it is saved."""

    kind: Any
    parts: dict[str, Any]  # attribute -> saved value
    context: Any
    size: Sequence[int]
    stride: Sequence[int]

    def put_together(self, unpack: Unpack) -> Tensor:
        parts = {name: unpack(part) for name, part in self.parts.items()}
        whole: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return whole


_OURS = (_SavedView, _SavedParts)


class Access:
    """The nets around one model."""

    def __init__(
        self, module: nn.Module, units: Sequence[Unit], prefetcher: Prefetcher, *, keeps: object
    ) -> None:
        """The module keeps `keeps` alive from now on.

        Errors: ConfigError for a module that was compiled as a whole
        """
        _check_not_compiled(module)
        self._keeps = keeps
        self._prefetcher = prefetcher
        self._module = module
        self._is_released = False
        # address of its values -> unit and sub-buffer
        self._sub_buffer_at: dict[int, tuple[Unit, SubBuffer]] = {}
        for unit in units:
            unit.on_use = functools.partial(self._bring, unit)
            for sub_buffer in (sub_buffer for sub_buffer in unit.sub_buffers if sub_buffer.is_sharded):
                self._sub_buffer_at[sub_buffer.param_shard.values.address] = (unit, sub_buffer)
                sub_buffer.param_shard.values.on_new_memory = functools.partial(
                    self._note_memory, unit, sub_buffer
                )
        self._unit_of = {
            id(member.param): unit
            for unit in units
            for sub_buffer in unit.sub_buffers
            for member in sub_buffer.members
        }
        self._units, self._root = tuple(units), units[-1]
        self._modules = tuple(_modules_of(units))
        self._forwards: list[ModuleForward] = []
        self._library_hooks: list[Any] = []
        self._hooks = self._make_hooks()
        # The output of the module that ran last, which will tell that a backward comes to its unit.
        self._last_output: tuple[Unit, list[Tensor], UnitUse | None] | None = None
        for submodule, unit, is_top in self._modules:
            if unit is not self._root and not unit.is_sharded:
                continue  # it stays whole
            if is_top or next(submodule.parameters(), None) is not None:
                forward = ModuleForward(submodule, functools.partial(self._call, unit, is_top), unit)
                submodule.forward = forward
                self._forwards.append(forward)
                parameters_of(submodule).unshard = self._bring_attribute
                self._library_hooks += (*watch_libraries(submodule), *name_in_state_dicts(submodule))

    def _note_memory(self, unit: Unit, sub_buffer: SubBuffer, was: int) -> None:
        del self._sub_buffer_at[was]
        self._sub_buffer_at[sub_buffer.param_shard.values.address] = (unit, sub_buffer)

    def release(self) -> None:
        """Take the nets away."""
        if self._is_released:  # the parameters may be another engine's by now
            return
        self._is_released = True
        for unit in self._units:
            unit.on_use = unit.show
        for forward in self._forwards:
            forward.release()
        for hook in self._library_hooks:
            hook.remove()
        for submodule in self._module.modules():
            plain_again(submodule)

    def compile(self, options: Mapping[str, Any]) -> int:
        """Compile the forward of every module that has a whole unit's parameters here when it
        runs; return how many.

        Not the root's: in it the other units are unsharded and resharded, which compiled code cannot do.
        """
        unit_of = {id(submodule): unit for submodule, unit, _ in self._modules}
        tops = [
            submodule
            for submodule, unit, is_top in self._modules
            if is_top and all(unit_of[id(below)] is unit for below in submodule.modules())
        ]
        for submodule in tops:
            if isinstance(submodule.forward, ModuleForward):
                submodule.forward.inner = torch.compile(submodule.forward.__wrapped__, **options)
        return len(tops)

    # ---- 1: modules

    def _call(self, unit: Unit, is_top: bool, forward: ModuleForward, args: Any, kwargs: Any) -> Any:
        """A forward of the unit, where none is under way.

        If another one has just come to it, no unit is gathered or resharded.
        """
        if not (is_top and self._prefetcher.is_at(unit) and _is_ours(top_hooks())):
            return self._call_first(unit, is_top, forward, args, kwargs)
        unit.num_forwards += 1
        try:
            output = forward.inner(*args, **kwargs)
        finally:
            unit.num_forwards -= 1
        if torch.is_grad_enabled() and unit is not self._root:
            self._note_output(unit, output)
        return output

    def _call_first(self, unit: Unit, is_top: bool, forward: ModuleForward, args: Any, kwargs: Any) -> Any:
        """Run a forward that comes to the unit."""
        if torch._C._is_tracing():
            raise ConfigError(f"torch.jit.trace() came to a forward; {NOT_EXPORTED}")
        if self._last_output is not None and self._last_output[0] is not unit:
            self._watch_last_output()
        self._prefetcher.enter(unit)
        try:
            with self.saved_values():
                output = forward.inner(*args, **kwargs)
        except BaseException as error:
            self._last_output = None
            check_transform(error)
            raise
        finally:
            self._prefetcher.leave(unit)
        # Another unit has just returned what the root returns, and the values of that unit are
        # needed first.
        is_part_of_checkpoint = in_backward() and not is_top
        if torch.is_grad_enabled() and not is_part_of_checkpoint and unit is not self._root:
            self._note_output(unit, output)
        if not self._prefetcher.num_forwards:
            self._watch_last_output()
            self._prefetcher.end_forward()
        return output

    # ---- 2: outputs

    def _note_output(self, unit: Unit, output: Any) -> None:
        """Note the output of a unit; modules of one unit that run one after the other have one output in
        common.
        """
        leaves = (output,) if isinstance(output, Tensor) else tree_leaves(output)
        of_graph = [one for one in leaves if isinstance(one, Tensor) and one.grad_fn is not None]
        use = self._prefetcher.note_use(unit, is_output=True) if of_graph and unit.is_sharded else None
        self._last_output = unit, of_graph, use

    def _watch_last_output(self) -> None:
        if self._last_output is None:
            return
        (unit, of_graph, use), self._last_output = self._last_output, None

        def enter_backward(grad: Tensor) -> None:
            if torch.is_grad_enabled():
                self._prefetcher.hold_all()  # this backward makes a graph
            self._prefetcher.enter_backward(unit, use)

        for tensor in of_graph:
            tensor.register_hook(enter_backward)  # type: ignore[no-untyped-call]

    # ---- 3: saved values

    def saved_values(self) -> AbstractContextManager[object]:
        """Have autograd save the places of tensors in a unit's memory,
        and unshard the unit where it needs the values.
        """
        below = top_hooks()
        if _is_ours(below):
            return nullcontext()
        if below is None:
            pack, unpack = self._hooks
        elif getattr(below[0], "__module__", None) == _CHECKPOINTS:
            pack, unpack = self._hooks_in_checkpoint(*below)
        else:
            pack, unpack = self._hooks_over(*below)
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _make_hooks(self) -> tuple[Pack, Unpack]:
        """Return the hooks of all saved tensors. Most lie elsewhere: these cost one look."""
        look = self._look = self._make_look()

        def pack(tensor: Tensor) -> Any:
            saved = look(tensor)
            # An output of the operation that saves it would keep this operation, and so itself, for ever.
            is_result = saved is tensor and type(tensor) is Tensor and not tensor.is_leaf
            return tensor.detach() if is_result else saved

        def unpack(saved: Any) -> Any:
            if type(saved) is _SavedParts:
                return saved.put_together(unpack)
            return self._read(saved) if type(saved) is _SavedView else saved

        pack._is_dslaunch = True  # type: ignore[attr-defined]
        return pack, unpack

    def _make_look(self) -> Pack:
        """Return the function that makes records of tensors in a unit's memory, and returns others as they
        are.
        """
        sub_buffer_at, note_use = self._sub_buffer_at, self._prefetcher.note_use

        def look(tensor: Tensor) -> Any:
            try:
                place = sub_buffer_at.get(address_of(tensor))
            except NotImplementedError:  # a tensor without storage; its parts keep their own memory
                return tensor
            use = None if place is None else note_use(place[0], is_output=False)
            if type(tensor) in _PLAIN:
                return tensor if place is None else _saved_in(*place, tensor, use)
            with torch._C.DisableTorchFunctionSubclass():  # a class may refuse to describe itself
                if place is not None:
                    return _saved_in(*place, tensor, use)
                parts = _pack_parts(tensor, look)
                return tensor if parts is None else parts

        return look

    def _hooks_over(self, pack_below: Pack, unpack_below: Unpack) -> tuple[Pack, Unpack]:
        """Return hooks that leave tensors outside the units' memory to the hooks that were set before."""
        look = self._look

        def pack(tensor: Tensor) -> Any:
            saved = look(tensor)
            return saved if type(saved) in _OURS else (pack_below(saved),)

        def unpack(saved: Any) -> Tensor:
            if type(saved) is _SavedParts:
                return saved.put_together(self._hooks[1])
            return self._read(saved) if type(saved) is _SavedView else unpack_below(saved[0])

        pack._is_dslaunch = True  # type: ignore[attr-defined]
        return pack, unpack

    def _hooks_in_checkpoint(self, pack_below: Pack, unpack_below: Unpack) -> tuple[Pack, Unpack]:
        """Note the uses of the unit, and leave the saved tensors to the checkpoint.

        It keeps nothing, and computes it again from the parameters that there are then. It counts what is
        saved both times; a view that was made outside lies in a unit's memory the first time only.
        """
        sub_buffer_at, note_use = self._sub_buffer_at, self._prefetcher.note_use

        def pack(tensor: Tensor) -> Any:
            with suppress(NotImplementedError):  # a tensor without storage
                place = sub_buffer_at.get(address_of(tensor))
                if place is not None:
                    note_use(place[0], is_output=False, stays=not place[0].num_forwards)
            return pack_below(tensor)

        pack._is_dslaunch = True  # type: ignore[attr-defined]
        return pack, unpack_below

    def _read(self, saved: _SavedView) -> Tensor:
        unit, sub_buffer, member, num_changes, use, place = saved
        params = sub_buffer.param_shard
        if params.num_changes[member] != num_changes:
            raise _out_of_date(sub_buffer.members[member].name)
        if torch.is_grad_enabled():
            self._prefetcher.hold_all()  # this backward makes a graph
        self._prefetcher.unshard_values(unit, use)
        values = params.values
        return values.views[member] if place is None else values.flat.as_strided(*place)

    # ---- 4: uses

    def _bring_attribute(self, param: nn.Parameter) -> None:
        unit = self._unit_of.get(id(param))
        if unit is not None and not torch.compiler.is_compiling():
            self._bring(unit)

    def _bring(self, unit: Unit) -> None:
        """Let a unit's parameters have their values: a program is about to use one that is a placeholder."""
        if not unit.is_here and self._prefetcher.is_running:
            self._prefetcher.unshard_until_end(unit)
        unit.show()


def _check_not_compiled(module: nn.Module) -> None:
    """Refuse a module that is compiled as a whole: our nets inside it do nothing."""
    for name, submodule in module.named_modules():
        if submodule._compiled_call_impl is not None or type(submodule).__module__ == _COMPILED:
            shown = f"'{name}'" if name else "the model"
            raise ConfigError(
                f"{shown} was compiled, which stage 3 does not support: the compiled code "
                "would have to gather parameters; call engine.compile() after initialize() instead, which "
                "compiles the forward of each block, or compile some before: block.forward = "
                "torch.compile(block.forward)"
            )


def _modules_of(units: Sequence[Unit]) -> Iterator[tuple[nn.Module, Unit, bool]]:
    """Yield every module once, with its unit, and whether it is one of the unit's tops.

    The last unit is the root.
    """
    seen: set[int] = set()
    for unit in units:
        for top in unit.modules:
            for one in top.modules():
                if id(one) not in seen:
                    seen.add(id(one))
                    yield one, unit, one is top


def _is_ours(hooks: tuple[Pack, Unpack] | None) -> bool:
    return hooks is not None and getattr(hooks[0], "_is_dslaunch", False)


def _saved_in(unit: Unit, sub_buffer: SubBuffer, tensor: Tensor, use: UnitUse | None) -> _SavedView | Tensor:
    """Return the record that autograd is to save for a tensor in a unit's memory."""
    params = sub_buffer.param_shard
    values = params.values
    if tensor.is_nested:  # a nested tensor has no strides, and keeps the memory
        return tensor
    # Seen as another dtype, conjugated or negated: a place does not say this.
    if tensor.dtype != values.flat.dtype or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    offset = tensor.storage_offset()
    member = params.index_at(int(offset))
    is_whole = tensor.is_set_to(values.views[member])
    place = None if is_whole else (tensor.size(), tensor.stride(), offset)
    return _SavedView(unit, sub_buffer, member, params.num_changes[member], use, place)


def _pack_parts(tensor: Any, pack: Pack) -> _SavedParts | None:
    """Return what is saved of a tensor that consists of others; None if none of these lies in
    a unit's memory.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}  # some are no tensors
    packed = {name: pack(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
    if not any(type(part) in _OURS for part in packed.values()):
        return None
    return _SavedParts(type(tensor), packed, context, tensor.size(), tensor.stride())


def check_transform(error: BaseException | None) -> None:
    """Errors: ConfigError instead of torch.func's error about hooks, which a program has not set"""
    if isinstance(error, RuntimeError) and _REFUSES_HOOKS in str(error):
        raise ConfigError(
            "torch.func.grad, vjp, jacrev and hessian cannot differentiate through modules whose parameters "
            "are sharded: they refuse the hooks that find a parameter which autograd has saved; take the "
            "derivative with torch.autograd.grad(create_graph=True), or torch.func.jvp, or use ZeRO stage 2"
        ) from error


def _out_of_date(name: str) -> ConfigError:
    """Return the error for a graph whose saved tensors were written in place, instead of torch's."""
    return ConfigError(
        f"this backward needs parameter '{name}' as it was in the forward, and engine.step(), a load or "
        "GatheredParameters(modifier_rank=...) has changed it since: its gradients would be of no one state; "
        "run the forward again after that, or call backward() before it"
    )
