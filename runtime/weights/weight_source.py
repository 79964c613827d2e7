"""The weights of an engine for vLLM's trainer-side API, which sends them to its servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..checkpoint.export.output_plan import Spec
from ..errors import ConfigError
from .digest import WeightsDigest
from .weights_pass import WeightsPass

_VLLM = "vllm.distributed.weight_transfer"


class ParamMeta(NamedTuple):
    """One tensor that will be sent; the fields are those of vLLM's class."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class HasWeights(Protocol):
    """An engine."""

    def weights(self, names: Any, **options: Any) -> Iterator[tuple[str, Tensor]]: ...


class WeightSource:
    """The weights of an engine, as vLLM's `WeightSource`.

    Every rank makes one, and iterates over it in step with the others; rank 0 sends. `digest` of the last
    pass tells a receiver whether it has what was sent.
    Source: vLLM's documentation, "Weight transfer", trainer-side API: WeightSource, ParamMeta
    """

    def __init__(
        self,
        engine: HasWeights,
        names: str | Callable[[str], str | None] = "hf",
        *,
        merge_lora: bool = False,
        only_trainable: bool = False,
        with_digest: bool = False,
    ) -> None:
        """Arguments are those of `engine.weights()`; `with_digest`: compute `digest` in each pass."""
        self._engine, self._names, self._with_digest = engine, names, with_digest
        self._options = {"merge_lora": merge_lora, "only_trainable": only_trainable}
        self.digest = WeightsDigest()
        self._meta: Any = ParamMeta
        vllm = _vllm()
        if vllm is not None:
            vllm.WeightSource.register(WeightSource)
            self._meta = vllm.ParamMeta

    def _pass(self) -> WeightsPass:
        weights = self._engine.weights(self._names, **self._options)
        if not isinstance(weights, WeightsPass):
            raise AssertionError(f"{type(weights).__name__} has no plan")
        return weights

    def specs(self) -> dict[str, Spec]:
        """Return shape and dtype of each tensor, in the order of the pass. Nothing is sent, but for stages
        that tell each other what they hold.
        """
        return self._pass().plan.specs()

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each tensor, in the order of the pass."""
        return [
            self._meta(name=name, dtype=spec.dtype, shape=spec.shape) for name, spec in self.specs().items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Begin a pass.

        Order: a collective
        """
        weights = self._pass()
        if not self._with_digest:
            return weights
        self.digest = WeightsDigest()
        return _digested(weights, self.digest)

    def held_names(self) -> set[str] | None:
        """Return None: every rank has every tensor."""
        return None

    def check(self, known: str | Path | Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes with those of the model that a server has, before anything is sent:
        the folder of safetensors it was started from, or shapes by name.

        Errors: ConfigError for the first name that it does not know, or whose shape is another
        """
        shapes = _shapes(Path(known)) if isinstance(known, (str, Path)) else known
        for name, spec in self.specs().items():
            if name not in shapes:
                raise ConfigError(
                    f"the receiver has no tensor '{name}' {list(spec.shape)}; it has {len(shapes)}, e.g. "
                    f"'{next(iter(shapes), '')}': give names= that it knows, or start it from this model"
                )
            if tuple(shapes[name]) != spec.shape:
                raise ConfigError(
                    f"'{name}' is {list(spec.shape)} here and {list(shapes[name])} at the receiver; start it "
                    "from a model of this shape"
                )


def _vllm() -> Any:
    """Return vLLM's module of this API, if it is installed: a program that has it will send by it."""
    if find_spec("vllm") is None:
        return None
    try:
        module = import_module(_VLLM)
    except ImportError:
        return None
    return module if hasattr(module, "WeightSource") and hasattr(module, "ParamMeta") else None


def _digested(weights: Iterator[tuple[str, Tensor]], digest: WeightsDigest) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        digest.add(name, tensor)
        yield name, tensor
        del tensor


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the headers of a folder's safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(one["shape"]) for name, one in header.items() if name != "__metadata__"}
    if not shapes:
        raise ConfigError(
            f"{folder} has no safetensors files; name the folder that the server was started from"
        )
    return shapes
