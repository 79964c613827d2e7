"""An engine's weights: state_dicts, and files of them for other programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.export.output_plan import DEFAULT_SHARD_SIZE, SAFETENSORS
from ..checkpoint.files.format import write_atomically
from ..errors import CheckpointError
from ..mesh.domain import Domains
from ..placement.stage_policy import Placement
from ..strided import is_strided
from ..weights.files import write_weights
from ..weights.model_names import make_naming
from ..weights.naming import Naming, Rename
from ..weights.weights_pass import To, WeightsPass
from ..zero.access.whole_parameters import whole_parameters
from ..zero.model.sharded_model import ShardedModel
from ..zero.parameters.wrapped import is_wrapped, unwrapped, wrapped_again
from .dry_run import NoCopies

_SHAPES_ADVICE = (
    "Nothing was loaded. Build the model with the shapes of the state_dict, or leave these names out of it "
    "and give strict=False."
)


class Weights:
    """Weights of an engine, at every stage under the names of the module's own state_dict."""

    def __init__(self, module: nn.Module, model: ShardedModel, domains: Domains) -> None:
        self._module, self._model, self._domains, self._job = module, model, domains, domains.job

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the module's state_dict; where parameters are sharded, with copies of all of
        them on every rank.

        Order: a collective where parameters are sharded
        """
        with self._model.gathered(), whole_parameters(self._model.units):
            state: dict[str, Any] = self._module.state_dict(*args, **kwargs)
            state |= self._elsewhere(state, str(kwargs.get("prefix", "")))
            return _cloned(state) if self._model.policy.parameters is Placement.SHARDED else state

    def _elsewhere(self, state: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
        """Return copies of the parameters that only other ranks have.

        Order: a collective where there are any
        """
        elsewhere: dict[str, Tensor] = {}
        for sub_buffer in (one for unit in self._model.units for one in unit.sub_buffers):
            names = sub_buffer.domain.names
            if names is None:
                continue
            for member in sub_buffer.members:
                values = names.gather(member.param.detach(), what=f"parameter '{member.name}'")
                named = zip(names.all(member.name), values, strict=True)
                elsewhere |= {prefix + name: value for name, value in named}
        return {name: value for name, value in elsewhere.items() if name not in state}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool, *, may_miss: Iterable[str] = ()
    ) -> Any:
        """Load weights into the module, and into the optimizer's float32 masters where there are any.
        Names in `may_miss` need not be there.

        Order:  a collective
        Errors: torch's on its rank, CheckpointError on others; then nothing is loaded on any
        """
        self._model.parked_states.check_here("load_state_dict()")
        with self._model.gathered():
            result = self._load(state_dict, strict, frozenset(may_miss))
            self._model.take_edits()
        return result

    def _load(self, state_dict: Mapping[str, Any], strict: bool, may_miss: frozenset[str]) -> Any:
        with whole_parameters(self._model.units):
            # a strict load allows no missing keys: fill these with the present values
            if strict and may_miss:
                own = self._module.state_dict(keep_vars=True)
                state_dict = {name: own[name] for name in may_miss & own.keys()} | dict(state_dict)
            # When torch raises for some weights, it has already written the others; and the ranks' weights
            # may differ. So try first.
            self._check_together("load_state_dict()", lambda: self._try_load_state_dict(state_dict, strict))
            return self._module.load_state_dict(state_dict, strict)

    def load_by(self, load: Callable[..., object], state_dict: Mapping[str, Any]) -> None:
        """Have `load(src=state_dict, dst=module)` write the weights.

        Order:  a collective
        Errors: what it raised on its rank, CheckpointError on others
        """
        self._model.parked_states.check_here("load_module_state_dict()")
        what = "load_module_state_dict(custom_load_fn=...)"
        with self._model.gathered(), torch.no_grad():
            try:
                with whole_parameters(self._model.units):
                    self._check_together(what, lambda: load(src=state_dict, dst=self._module))
            except BaseException:
                if self._model.is_sharded:
                    self._model.forget_writes(self._model.units)  # the shards have not changed
                else:
                    self._model.parked_states.barred = (
                        f"{what} has failed in the middle, so parameters are of no one state; load a "
                        "checkpoint, or make a new engine"
                    )
                raise
            self._model.take_edits()

    def naming(self, names: str | Rename, *, merges: bool, only_trainable: bool) -> Naming:
        """Return what these arguments of `engine.weights()` ask for.

        Errors: ConfigError
        """
        return make_naming(self._module, names, merges=merges, only_trainable=only_trainable)

    def one_pass(
        self,
        naming: Naming | None = None,
        *,
        left_out: Collection[str] = (),
        to: To = "first",
        by_itemsize: bool = False,
    ) -> WeightsPass:
        """Begin a pass over the weights except those in `left_out`.

        Order:  a collective
        Errors: ConfigError, on all ranks
        """
        return WeightsPass(
            self._module,
            self._model,
            self._domains,
            naming=naming,
            left_out=left_out,
            to=to,
            by_itemsize=by_itemsize,
        )

    def frozen(self) -> set[str]:
        """Return the names of the parameters that need no gradient."""
        named = self._module.named_parameters(remove_duplicate=False)
        here = {name for name, param in named if not param.requires_grad}
        sub_buffers = [sub_buffer for unit in self._model.units for sub_buffer in unit.sub_buffers]
        return here | {
            name
            for sub_buffer in sub_buffers
            for index, member in enumerate(sub_buffer.members)
            if not member.param.requires_grad
            for name in sub_buffer.true_names(index)
        }

    def not_trained(self) -> set[str]:
        """Return the names of all that an optimizer does not change: those parameters, and buffers."""
        return self.frozen() | {name for name, _ in self._module.named_buffers(remove_duplicate=False)}

    def save(
        self,
        save_dir: str | Path,
        save_filename: str,
        *,
        left_out: set[str],
        max_shard_size: int | str | None,
    ) -> None:
        """Write the weights except those in `left_out`; see `Engine.save_16bit_model`.

        Order:  every rank must call this
        Errors: CheckpointError, on every rank, if it cannot be written
        """
        path = Path(save_dir) / save_filename
        is_safetensors = path.suffix == SAFETENSORS
        if is_safetensors or max_shard_size is not None:
            weights = self.one_pass(left_out=left_out, by_itemsize=True)
            size = DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size
            write_weights(weights, self._job, save_dir, save_filename, max_shard_size=size)
            return
        state = self.consolidated_state_dict(left_out)
        problem: str | None = None
        if state is not None:
            try:
                write_atomically(path, lambda file: torch.save(state, file))
            except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of a full disk
                problem = f"{path} cannot be written: {error}"
        problem = self._job.all_gather_objects(problem, what="the success of saving")[0]
        if problem is not None:
            raise CheckpointError(problem)

    def consolidated_state_dict(self, left_out: set[str]) -> dict[str, Any] | None:
        """Return the module's state_dict in rank 0's host memory, None on other ranks;
        rank 0 gathers unit after unit.

        Order: every rank must call this
        """
        weights = self.one_pass(left_out=left_out)
        values = {name: value.to("cpu", copy=True) for name, value in weights}
        if not self._job.is_first:
            return None
        values |= {name: values[first] for name, first in weights.plan.aliases.items()}
        # keep_vars, because detaching a parameter asks for its values, which may be sharded
        state = {
            name: value
            for name, value in self._module.state_dict(keep_vars=True).items()
            if name not in left_out
        }
        own = {
            name: values[name] if name in values else _to_host(name, value, values)
            for name, value in state.items()
        }
        inner = unwrapped(state.items()).keys() - state.keys()
        return own | {name: value for name, value in values.items() if name not in inner}

    def _try_load_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        named = self._module.state_dict(keep_vars=True).items()
        extra_state = deepcopy({name: value for name, value in named if not isinstance(value, Tensor)})
        try:
            with NoCopies():
                self._module.load_state_dict(state_dict, strict)
        except BaseException as error:
            if extra_state:
                self._module.load_state_dict(extra_state, strict=False)
            if isinstance(error, RuntimeError) and "size mismatch" in str(error):
                raise RuntimeError(f"{error}\n{_SHAPES_ADVICE}") from error
            raise

    def _check_together(self, what: str, do: Callable[[], object]) -> None:
        """Call `do`, and go on only if all ranks can.

        Order:  a collective
        Errors: what it raised on its rank, CheckpointError on others
        """
        problem: Exception | None = None
        try:
            do()
        except Exception as error:
            problem = error
        own = None if problem is None else f"{type(problem).__name__}: {problem}"
        problems = self._job.all_gather_objects(own, what=f"the success of {what}")
        if problem is not None:
            raise problem
        for rank, text in enumerate(problems):
            if text is not None:
                raise CheckpointError(f"{what} failed on rank {rank}, so no rank goes on with it: {text}")


def _to_host(name: str, value: Any, values: Mapping[str, Tensor]) -> Any:
    if is_wrapped(value):
        return wrapped_again(name, value, values)
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict with copies of its tensors; tied tensors share one copy."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}

    def cloned(value: Any) -> Any:
        if is_strided(value):
            return copies.setdefault((value.data_ptr(), value.shape), value.clone())
        return value.clone() if isinstance(value, Tensor) else value

    return {name: cloned(value) for name, value in state.items()}
