"""optimizer: which one, and its parameters."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from pydantic import ConfigDict, Field, model_validator

from ..optimizers.registry import FROM_CONFIG
from .keys.value import Beta, Betas, Bool, Size
from .section import Section

_ONE_BIT = (
    "compresses gradients to one bit, which is not available in this version; take Adam or Lamb, with ZeRO"
)
_MUP = "is of the package mup: make it there and pass it to initialize(optimizer=...)"


class AdamParams(Section):
    """Adam with decoupled weight decay (AdamW), or with L2 weight decay where `adam_w_mode` is false.

    Source: DeepSpeed 0.19.6 ops/adam/fused_adam.py, `FusedAdam`; the same defaults.
    """

    lr: Size = 1e-3
    """learning rate, 0.001 if left out (Muon: 0.02, and 0.0003 for AdamW)"""
    weight_decay: Size = 0.0
    """0 if left out"""
    betas: Betas = (0.9, 0.999)
    """[0.9, 0.999] if left out (Muon: [0.9, 0.95])"""
    eps: Size = 1e-8
    """1e-8 if left out (Muon: 1e-10)"""
    adam_w_mode: Bool = True
    """false: weight decay is added to the gradient (type Adam only)"""
    bias_correction: Bool = True
    """true if left out; false: the moments are used as they are, from the first step on"""
    amsgrad: Bool = False
    """true: torch's own Adam or AdamW, with the largest second moment so far; false if left out"""
    maximize: Bool = False
    """true: torch's own Adam or AdamW, which goes up instead of down; false if left out"""
    torch_adam: Bool = False
    """there is one Adam; true: weight_decay that is left out is that of torch.optim.AdamW, 0.01"""

    @property
    def is_torchs(self) -> bool:
        """True if it is an Adam that only torch has."""
        return self.amsgrad or self.maximize

    @model_validator(mode="before")
    @classmethod
    def _torchs_decay(cls, given: Any) -> Any:
        """With DeepSpeed `torch_adam` is a class of torch's, which has another default of its own."""
        is_torchs_w = (
            isinstance(given, dict)
            and given.get("torch_adam") is True
            and given.get("adam_w_mode") is not False
        )
        return {"weight_decay": 0.01, **given} if is_torchs_w else given

    @model_validator(mode="after")
    def _one_adam(self) -> AdamParams:
        if self.is_torchs and not self.bias_correction:
            key = "amsgrad" if self.amsgrad else "maximize"
            raise ValueError(
                f"optimizer.params.{key} true and bias_correction false do not go together: torch's Adam, "
                "which has the first, always corrects; leave one out"
            )
        return self


class MuonParams(Section):
    """Muon for matrices, AdamW for all else; the same keys and defaults as DeepSpeed's."""

    lr: Size | None = None
    """Learning rate of both; left out: 0.02 for Muon, 0.0003 for AdamW."""
    muon_lr: Size | None = None
    """of the matrices, lr if left out"""
    adam_lr: Size | None = None
    """of all else, lr if left out"""
    momentum: Beta = 0.95
    """of the matrices, 0.95 if left out"""
    weight_decay: Size = 0.0
    betas: Betas = (0.9, 0.95)
    eps: Size = 1e-10

    def of_muon(self) -> dict[str, Any]:
        """The hyper-parameters of Muon's groups."""
        lr = _first(self.muon_lr, self.lr, 0.02)
        return {"lr": lr, "momentum": self.momentum, "weight_decay": self.weight_decay}

    def of_adam(self) -> dict[str, Any]:
        """The hyper-parameters of AdamW's groups."""
        lr = _first(self.adam_lr, self.lr, 3e-4)
        return {"lr": lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


class TorchOptimizerParams(Section):
    """The keyword arguments of an optimizer class, in `model_extra`."""

    model_config = ConfigDict(extra="allow")


class OptimizerConfig(Section):
    """The optimizer to build; the class of `params` follows from `type`."""

    type: str = Field(
        description=f"Adam, AdamW, Muon, {', '.join(FROM_CONFIG)}, or a class of torch.optim, in any case; "
        "Adam is AdamW unless adam_w_mode is false; Muon is for matrices, with AdamW for all else. The types "
        "below have these parameters, others their own keyword arguments"
    )
    params: AdamParams | MuonParams | TorchOptimizerParams


PARAMS_OF: dict[str, type[AdamParams] | type[MuonParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Muon": MuonParams,
}

_EIGHT_BITS = (
    'is of bitsandbytes: write "{name}", and data_types.optimizer_state_dtype "8bit", or make it there and '
    "pass it to initialize(optimizer=...)"
)
_OTHER_EIGHT_BITS = "is of bitsandbytes: make it there and pass it to initialize(optimizer=...)"
# Arguments of our optimizers that an engine cannot use: it refuses these, or says that they have no effect.
_NOT_FROM_CONFIG = {"amsgrad", "max_grad_norm", "set_grad_none"}
_REFUSED = {
    "OneBitAdam": _ONE_BIT,
    "OneBitLamb": _ONE_BIT,
    "ZeroOneAdam": _ONE_BIT,
    "MuAdam": _MUP,
    "MuAdamW": _MUP,
    "MuSGD": _MUP,
    "LBFGS": "runs forward and backward itself, which engine.step() has no place for; take another",
    **{
        f"{paged}{name}8bit": _EIGHT_BITS.format(name=name)
        for paged in ("", "Paged")
        for name in ("Adam", "AdamW")
    },
    **dict.fromkeys(
        ("Lion8bit", "PagedLion8bit", "AdEMAMix8bit", "SGD8bit", "LAMB8bit", "LARS8bit", "RMSprop8bit"),
        _OTHER_EIGHT_BITS,
    ),
    "SparseAdam": "needs sparse gradients, and averaged ones are dense here; take Adam",
}


def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    base = torch.optim.Optimizer
    classes = {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    ours = {name: row.load(row.config_class) for name, row in FROM_CONFIG.items()}
    return {name: kind for name, kind in {**classes, **ours}.items() if name not in {*_REFUSED, *PARAMS_OF}}


def optimizer_names() -> tuple[str, ...]:
    """Return the types that a config can name."""
    return tuple(sorted({*PARAMS_OF, *_classes()}))


def spelled(name: str) -> str | None:
    """Return an optimizer's type as it is spelled here; None if there is none of that name.

    Errors: ValueError if it is known and not available
    """
    for known, why in _REFUSED.items():
        if known.lower() == name.lower():
            raise ValueError(why)
    return {known.lower(): known for known in optimizer_names()}.get(name.lower())


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of a type that is spelled as here, and has no section of its own."""
    return _classes()[name]


def optimizer_params(name: str) -> tuple[str, ...]:
    """Return the keyword arguments of such a class."""
    names = tuple(inspect.signature(optimizer_class(name)).parameters)[1:]
    return tuple(one for one in names if not (name in FROM_CONFIG and one in _NOT_FROM_CONFIG))


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
