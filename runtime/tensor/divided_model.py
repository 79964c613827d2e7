"""A model of which each rank along the axis tp holds a part, with the methods that an engine calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..config.tensor import TensorParallelConfig
from ..errors import ConfigError
from ..mesh.cut import Cut
from ..mesh.domain import Domains
from ..mesh.parts import Parts
from .exchange import TensorAxis
from .inputs import InputCheck
from .lower import Division
from .misfit import naming_misfits
from .views import ViewCheck
from .vocabulary import CausalLoss


class DividedModel:
    """A model of which this rank holds a part."""

    def __init__(
        self, module: nn.Module, axis: TensorAxis, division: Division, *, settings: TensorParallelConfig
    ) -> None:
        self._axis, self._division, self._settings = axis, division, settings
        self.inputs = InputCheck(axis)
        self._num_forwards = 0
        self._module = weakref.ref(module)
        cuts = {id(param): cut for param, cut in division.cuts}
        for submodule in module.modules():
            own = {
                name: cuts[id(param)] for name, param in submodule._parameters.items() if id(param) in cuts
            }
            if own:
                submodule.register_state_dict_pre_hook(_RefuseParts(self, own))  # type: ignore[no-untyped-call]

    def naming_misfits(self) -> AbstractContextManager[object]:
        """Around a forward, see misfit.py; views.py, around forwards 1, 2, 4, 8 and so on of a model that is
        not compiled; and `CausalLoss.end_forward`.
        """
        module = self._module()
        if module is None:
            return nullcontext()
        self._num_forwards += 1
        stack = ExitStack()
        own = vars(module)  # transformers' property would warn of a kind of loss that it does not know
        if isinstance(loss := own.get("_loss_function", own.get("loss_function")), CausalLoss):
            stack.callback(loss.end_forward)
        stack.enter_context(naming_misfits(module, self._division))
        if self._num_forwards.bit_count() == 1 and not _is_compiled(module):
            stack.enter_context(ViewCheck())
        return stack

    def has(self, module: nn.Module) -> bool:
        """Tell whether the divided parameters of a module are this model's own, not copies of them."""
        own = {id(param) for param, _ in self._division.cuts}
        return any(id(param) in own for param in module._parameters.values())

    def divides(self, param: nn.Parameter) -> bool:
        """Tell whether a parameter of the model is this rank's part of a whole."""
        return any(param is one for one, _ in self._division.cuts)

    @property
    def size(self) -> int:
        """Number of ranks that the model is divided over."""
        return self._axis.size

    def again(self, settings: TensorParallelConfig) -> DividedModel:
        """Return the divided model for a further engine, after an earlier one.

        Errors: ConfigError if the ds_config would divide it differently
        """
        if settings != self._settings:
            raise ConfigError(
                "this model is divided over ranks already, by an initialize() before, and the ds_config's "
                "section tensor_parallel is another one now: give the same, or make the model anew and load "
                "a checkpoint of the engine before"
            )
        return self

    def join(self, domains: Domains, device: torch.device) -> None:
        """Give the divided parameters a domain of their own, and their layers a process group, for an engine
        on this device.

        Order: a collective
        """
        group = domains.copies_group
        self._axis.join(group)
        self.inputs.begin_again(device)
        if not self._division.cuts and domains.axes.pp == 1:
            return
        for domain in domains.all:  # the dense one, and those of tied layers, which several stages share
            own = [(param, cut) for param, cut in self._division.cuts if domains.of(param) is domain]
            mesh = domain.comm.mesh
            domains.add(
                "cut over tp" if domain is domains.dense else f"{domain.name}, cut over tp",
                sharers=domain.sharers,
                shard_size=domain.shard_size,
                states_by_chunk=mesh.states_by_chunk,
                divisor=mesh.divisor,
                params=[param for param, _ in own],
                parts=Parts(group, own),
            )

    def agree_on_random_numbers(self, device: torch.device) -> None:
        """Let ranks that compute a layer together draw the same random numbers from now on, e.g. for dropout.

        Order: a collective
        """
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        first_states = self._axis.group.all_gather_objects(states, what="the states of random numbers")[0]
        torch.set_rng_state(first_states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(first_states[1], device)

    def successor(self, param: Any) -> Any:
        """Return the new parameter in place of one from before the division; any other value as it is."""
        return self._division.successors.get(id(param), param)

    def renew_optimizer(self, optimizer: Any) -> Any:
        """Replace the parameters in an optimizer that was made before the division by the present ones."""
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                group["params"] = [self.successor(param) for param in group["params"]]
        return optimizer

    def renew_parameters(self, given: Any) -> Any:
        """Return model_parameters with the present parameters."""
        return None if given is None else list(self._renewed(given))

    def _renewed(self, given: Iterable[Any]) -> Iterator[Any]:
        for item in given:
            if isinstance(item, Mapping):
                listed = item["params"]
                params = [listed] if isinstance(listed, Tensor) else listed
                yield {**item, "params": list(self._renewed(params))}
            elif isinstance(item, tuple):
                name, param = item
                yield name, self.successor(param)
            else:
                yield self.successor(item)


def _is_compiled(module: nn.Module) -> bool:
    return any(one._compiled_call_impl is not None for one in module.modules())


def check_optimizer(optimizer: object) -> None:
    """Check that an optimizer has no states yet of parameters that are about to be divided.

    Errors: ConfigError if it has taken steps
    """
    states = optimizer.state.values() if isinstance(optimizer, torch.optim.Optimizer) else ()
    if any(state.get("step", 1) for state in states if state):  # Adagrad's states begin with a 0
        raise ConfigError(
            f"the {type(optimizer).__name__} given to initialize() has taken steps with whole parameters, "
            "which tensor_parallel divides over ranks; give one without states, and load a checkpoint "
            "after initialize()"
        )


def earlier_division(module: nn.Module) -> DividedModel | None:
    """Return the result of an earlier call of divide() for this model; None if there was none.

    Errors: ConfigError for a copy of a divided model, or for a model that contains two divided ones
    """
    earlier: DividedModel | None = None
    for name, one in module.named_modules():
        for hook in one._state_dict_pre_hooks.values():
            if not isinstance(hook, _RefuseParts) or not any(hook.parts_of(one)):
                continue
            if not hook.divided.has(one) or earlier not in (None, hook.divided):
                raise ConfigError(
                    f"module '{name}' has this rank's parts of parameters: it is a copy of a layer that "
                    "initialize() has divided over ranks, or of another model than the others; give the "
                    "model itself, or a copy that was made before initialize(), or inside of "
                    "dslaunch.zero.GatheredParameters(model.parameters()), where parameters are whole"
                )
            earlier = hook.divided
    return earlier


class _RefuseParts:
    """A hook of state_dict() of one module: a file with one rank's parts is of no use, and says so only when
    it is loaded.
    """

    def __init__(self, divided: DividedModel, cuts: Mapping[str, Cut]) -> None:
        self.divided, self._cuts = divided, cuts

    def __deepcopy__(self, memo: dict[int, Any]) -> _RefuseParts:
        """Return a hook for a copy of the module, which holds parts, too."""
        return self

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:  # the caller wants the parameters themselves
            return
        for name, param, cut in self.parts_of(module):
            raise ConfigError(
                f"state_dict() of the module would hold this rank's part of parameter '{prefix}{name}', "
                f"{tuple(param.shape)} of {cut.shape}, which is divided over ranks; call on all ranks "
                "engine.state_dict(), save_16bit_model() or save_checkpoint(), which have whole "
                "tensors"
            )

    def parts_of(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Cut]]:
        """Yield the parameters of a module that are not whole now."""
        for name, cut in self._cuts.items():
            param = dict(module._parameters).get(name)
            if param is not None and tuple(param.shape) != cut.shape:
                yield name, param, cut
