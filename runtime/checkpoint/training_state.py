"""Parts of a training that a checkpoint saves and loads."""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.rank_group import Job
from ..config import Config
from ..data.loader import Loader
from ..mesh.domain import Domains
from ..step.flat_optimizer import FlatOptimizer
from ..step.loss_scale import LossScaler
from ..zero.model.sharded_model import ShardedModel
from ..zero.parameters.packed import lies_in_unit
from ..zero.parameters.wrapped import unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Parts of one engine."""

    module: nn.Module
    model: ShardedModel
    optimizer: FlatOptimizer | None
    scheduler: Any  # has step(), and state_dict() and load_state_dict() if it has a state
    progress: Progress
    loader: Loader | None  # loader of the training data, where that is ours
    scaler: LossScaler
    config: Config
    domains: Domains

    @property
    def job(self) -> Job:
        """Return all ranks."""
        return self.domains.job

    def beside_units(self) -> dict[str, Any]:
        """Return what of the module's state_dict lies in no unit: buffers, integer parameters, extra state;
        and what packed parameters have whole.
        """
        in_units = {
            name
            for name, param in unwrapped(self.module.named_parameters(remove_duplicate=False)).items()
            if lies_in_unit(param)
        }
        in_units |= {
            name
            for unit in self.model.units
            for sub_buffer in unit.sub_buffers
            for index in range(len(sub_buffer.members))
            for name in sub_buffer.true_names(index)
        }
        # keep_vars, because detaching a parameter asks for its values, which may be sharded
        state = self.model.packed_whole | unwrapped(self.module.state_dict(keep_vars=True).items())
        return {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in state.items()
            if name not in in_units
        }

    @property
    def leads(self) -> bool:
        """True if this rank speaks for those that hold the same layers."""
        return self.domains.leads

    def written_beside(self) -> dict[str, Any]:
        """Return what of `beside_units` this rank writes into a checkpoint: the first of those that share
        it.
        """
        named = self.model.packed_whole | unwrapped(self.module.state_dict(keep_vars=True).items())

        def is_ours(name: str) -> bool:
            value = named[name]
            if not isinstance(value, Tensor):
                return self.leads
            mesh = self.domains.of(value).comm.mesh
            return mesh.sharers.index == 0 and mesh.is_counted

        return {name: value for name, value in self.beside_units().items() if is_ours(name)}

    def aliases(self) -> dict[str, str]:
        """Return the other names of tied parameters, and the name under which each is in a unit."""
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for name, param in unwrapped(self.module.named_parameters(remove_duplicate=False)).items():
            known = first.setdefault(id(param), name)
            if known != name:
                aliases[name] = known
        return aliases


@dataclass(slots=True, kw_only=True)
class Progress:
    """The engine's counters, as DeepSpeed counts them.

    Units: micro_steps counts micro batches, global_steps optimizer steps, the skipped ones among them
    """

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the numbers that a checkpoint keeps."""
        return asdict(self)

    def become(self, other: Progress) -> None:
        """Take all counters of another one."""
        for name, value in asdict(other).items():
            setattr(self, name, value)

    def restore(self, saved: dict[str, Any], *, gradient_accumulation_steps: int) -> None:
        """Take a checkpoint's counters; accumulation starts afresh, as its gradients are not saved."""
        self.global_steps = int(saved["global_steps"])
        self.global_samples = int(saved["global_samples"])
        self.skipped_steps = int(saved["skipped_steps"])
        self.micro_steps = self.global_steps * gradient_accumulation_steps


def rng_state() -> dict[str, Any]:
    """Return the states of torch's, the GPU's, Python's and numpy's generators as plain data."""
    numpy = sys.modules.get("numpy")  # not imported: the program draws no numbers from it
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": None,
    }
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Continue the sequences of numbers from `state`, as far as this process has the generators."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    numpy = sys.modules.get("numpy")
    if state["numpy"] is not None and numpy is not None:
        numpy.random.set_state(state["numpy"])
