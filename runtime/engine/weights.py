"""An engine's weights, for who reads or writes them: state_dicts, and a file of them for other programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.export.output_plan import DEFAULT_SHARD_SIZE, SAFETENSORS
from ..checkpoint.files.format import write_atomically
from ..comm.collectives import Collectives
from ..errors import CheckpointError, ConfigError
from ..placement.stage_policy import Placement, Policy
from ..zero.sharded_model import ShardedModel
from ..zero.sub_buffer import SubBuffer
from .dry_run import NoCopies
from .weights_stream import WeightsStream, write_weights


class Weights(nn.Module):
    """Everything here goes by the names of the module's own state_dict, at every stage."""

    module: nn.Module
    _model: ShardedModel
    _comm: Collectives
    _policy: Policy

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's parameters under the module's names; `parameters()` goes by this."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's state_dict; where parameters are sharded, with copies of all of
        them on every rank.

        Order: a collective where parameters are sharded
        """
        with self._model.gathered():
            state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
            return _cloned(state) if self._policy.parameters is Placement.SHARDED else state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights into the module, and into the optimizer's float32 masters where there are any."""
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) would replace parameters that lie in flat buffers"
            )
        self._model.offloaded.check_here("load_state_dict()")
        with self._model.gathered():
            # torch has written what fits when it raises for what does not;
            # and one rank's file may be another's
            self._check_together("load_state_dict()", lambda: self._try_load_state_dict(state_dict, strict))
            result = self.module.load_state_dict(state_dict, strict)
            self._model.take_edits()
        return result

    def _try_load_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> None:
        named = self.module.state_dict(keep_vars=True).items()
        extra_state = deepcopy({name: value for name, value in named if not isinstance(value, Tensor)})
        try:
            with NoCopies():
                self.module.load_state_dict(state_dict, strict)
        except BaseException:
            if extra_state:
                self.module.load_state_dict(extra_state, strict=False)
            raise

    def _check_together(self, what: str, do: Callable[[], object]) -> None:
        """Do it, and go on only if all ranks can.

        Order:  a collective
        Errors: what it raised on its rank, CheckpointError on others
        """
        problem: Exception | None = None
        try:
            do()
        except Exception as error:
            problem = error
        own = None if problem is None else f"{type(problem).__name__}: {problem}"
        told = self._comm.all_gather_objects(own, what=f"the success of {what}")
        if problem is not None:
            raise problem
        for rank, text in enumerate(told):
            if text is not None:
                raise CheckpointError(f"{what} failed on rank {rank}, so no rank goes on with it: {text}")

    def module_state_dict(
        self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return `state_dict()`, without the parameters that need no gradient where that is wanted.

        Order: a collective where parameters are sharded
        """
        state = self.state_dict(*args, **kwargs)
        left_out = _frozen(self.module) if exclude_frozen_parameters else set()
        return {name: value for name, value in state.items() if name not in left_out}

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> None:
        """Load `checkpoint["module"]`; `custom_load_fn(src=state, dst=module)` does it in place of
        load_state_dict().

        Order:  a collective where parameters are sharded; every rank gives the same weights
        Errors: CheckpointError if there is no "module" in it
        """
        if "module" not in checkpoint:
            raise CheckpointError(
                f"load_module_state_dict() was given {', '.join(map(str, checkpoint)) or 'nothing'}, "
                'but the weights belong under "module"; for a plain state_dict call engine.load_state_dict()'
            )
        if custom_load_fn is None:
            self.load_state_dict(checkpoint["module"], strict)
            return
        self._model.offloaded.check_here("load_module_state_dict()")
        what = "load_module_state_dict(custom_load_fn=...)"
        with self._model.gathered(), torch.no_grad():
            try:
                self._check_together(what, lambda: custom_load_fn(src=checkpoint["module"], dst=self.module))
            except BaseException:
                if not self._model.is_sharded:  # shards have not changed
                    self._model.offloaded.barred = (
                        f"{what} has failed in the middle, so parameters are of no one state; load a "
                        "checkpoint, or make a new engine"
                    )
                raise
            self._model.take_edits()

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Write the weights, in the model's dtypes, for a plain module or transformers' from_pretrained().

        Returns True.

        - One file of torch.save by default: rank 0 has all of it in host memory.
        - `save_filename` ends in .safetensors: unit after unit is written as it arrives, and several files
          with an index where there is more than `max_shard_size`, default 5GB. A tied parameter is there
          once, as transformers writes it.
        - Another name with `max_shard_size`: files of torch.save with an index;
          rank 0 has one of them in host memory.

        Rank 0 writes, whole or not at all; devices hold a unit more than usual.
        Order:  every rank must call this
        Errors: CheckpointError, on every rank, if it cannot be written
        """
        path = Path(save_dir) / save_filename
        is_safetensors = path.suffix == SAFETENSORS
        if is_safetensors or max_shard_size is not None:
            self._model.offloaded.check_here("the weights of the whole model")
            left_out = _frozen(self.module) if exclude_frozen_parameters else set()
            weights = WeightsStream(self.module, self._model, self._comm, left_out=left_out)
            size = DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size
            write_weights(weights, self._comm, save_dir, save_filename, max_shard_size=size)
            return True
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        problem: str | None = None
        if state is not None:
            try:
                write_atomically(path, lambda file: torch.save(state, file))
            except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of a full disk
                problem = f"{path} cannot be written: {error}"
        problem = self._comm.all_gather_objects(problem, what="the success of saving")[0]
        if problem is not None:
            raise CheckpointError(problem)
        return True

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Return the module's state_dict in rank 0's host memory, None on other ranks;
        unit after unit comes to rank 0.

        Order: every rank must call this
        """
        self._model.offloaded.check_here("a state_dict of the whole model")
        self._model.before_gather()
        left_out = _frozen(self.module) if exclude_frozen_parameters else set()
        parts = [
            part
            for unit in self._model.units
            for part in unit.parts
            if not left_out.issuperset(member.name for member in part.members)
        ]
        values: dict[str, Tensor] = {}
        for part in parts:
            if part.is_sharded:
                with part.here():
                    flat = self._comm.gather_to_first(part.on_device(part.param_shard.own), what=part.label)
                values |= {} if flat is None else by_name(part, flat)
            elif self._comm.mesh.world.index == 0:
                values |= by_name(part, part.param_shard.values.flat)
        if self._comm.mesh.world.index != 0:
            return None
        name_of = {id(member.param): member.name for part in parts for member in part.members}
        # keep_vars, because detaching a parameter asks for its values, which may be sharded
        return {
            name: values[name_of[id(value)]] if id(value) in name_of else _to_host(value)
            for name, value in self.module.state_dict(keep_vars=True).items()
            if name not in left_out
        }

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict  # what older trainers call


def _frozen(module: nn.Module) -> set[str]:
    """The names of parameters that need no gradient."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, param in named if not param.requires_grad}


def _to_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict with copies of its tensors, of tied ones the same copy."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: copies.setdefault((value.data_ptr(), value.shape), value.clone())
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def by_name(part: SubBuffer, flat: Tensor) -> dict[str, Tensor]:
    """Copy each parameter's elements out: torch.save writes the whole storage behind a view."""
    return {
        member.name: flat[slot.offset : slot.offset + slot.numel].view(slot.shape).to("cpu", copy=True)
        for member, slot in zip(part.members, part.layout.slots, strict=True)
    }
