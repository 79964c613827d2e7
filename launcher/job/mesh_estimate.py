"""Traffic and memory of the ranks of a mesh, estimated from the sizes of a model. Arithmetic only.

A block is attention and an MLP, or experts in its place. Embeddings and the head lie in no block and are
counted as if they were spread over the stages; layers of normalisation are left out, and so is the traffic of
tp for the head. `docs/train/which-axis.md` has the formulas.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ...shared.zero_bytes import adam_bytes, held_bytes, sent_bytes
from ..errors import LaunchError
from ..inputs.named_file import read_named
from ..options.mesh import EstimateOptions
from ..wording import shown_size
from .mesh import JobMesh

GATED = ("silu", "swiglu", "gelu_pytorch_tanh")  # MLPs with three matrices, as Llama's and Gemma's
_CONFIG = "config.json"


class ModelSizes(NamedTuple):
    """The sizes of one model; widths in elements."""

    hidden: int
    num_blocks: int
    query_width: int  # width of all heads of the queries together
    num_kv_heads: int
    head_width: int
    dense: int  # parameters
    experts: int = 0  # parameters of all experts together
    experts_per_token: int = 0


class Estimate(NamedTuple):
    """The estimate for a rank with stages before and behind it, and for one optimizer step."""

    sizes: ModelSizes
    options: EstimateOptions

    def sent_bytes(self, mesh: JobMesh, name: str) -> float:
        """Return the bytes that a rank sends along one axis in a step; along dp, with those that share its
        samples.
        """
        size = mesh.size(name)
        if name == "dp":
            return self._sent_by_zero(mesh)
        if size == 1:
            return 0.0
        model, given = self.sizes, self.options
        blocks, m = model.num_blocks / mesh.pp, given.micro_batches
        width = given.bytes * given.micro_batch * given.seq / mesh.sp
        if name == "pp":
            return 2 * m * width * model.hidden
        share = (size - 1) / size
        if name == "tp":
            return m * blocks * 8 * share * width * model.hidden
        if name == "sp":
            kv_width = max(model.num_kv_heads / mesh.tp, mesh.sp) * model.head_width
            return m * blocks * 2 * share * width * (2 * model.query_width / mesh.tp + 2 * kv_width)
        return m * blocks * 4 * share * width * model.hidden * model.experts_per_token

    def _sent_by_zero(self, mesh: JobMesh) -> float:
        given = self.options
        return sum(
            sent_bytes(
                params,
                number_bytes=given.bytes,
                stage=given.stage,
                num_ranks=num_ranks,
                num_micro_batches=given.micro_batches,
                is_pipeline=mesh.pp > 1,
            )
            for params, num_ranks in self._shared(mesh)
        )

    def _shared(self, mesh: JobMesh) -> list[tuple[float, int]]:
        """Return the parameters of a rank's stage, and the number of ranks that train them."""
        model, data = self.sizes, mesh.dp * mesh.sp
        held = [(model.dense / (mesh.pp * mesh.tp), data)]
        return held + ([(model.experts / (mesh.pp * mesh.ep), data // mesh.ep)] if model.experts else [])

    def held_bytes(self, mesh: JobMesh) -> float:
        """Return a rank's parameters, gradients, masters and AdamW states between two steps."""
        size = self.options.bytes
        return sum(
            held_bytes(
                params,
                each=adam_bytes(size),
                stage=self.options.stage,
                num_ranks=num_ranks,
            ).on_device
            for params, num_ranks in self._shared(mesh)
        )

    def describe(self, mesh: JobMesh) -> str:
        """Return one line: the model, and a rank's part of it."""
        model, given = self.sizes, self.options
        return (
            f"estimate: {_billions(model.dense + model.experts)} parameters in {model.num_blocks} blocks of "
            f"width {model.hidden}, ZeRO stage {given.stage}, {given.bytes} bytes a number, micro batches: "
            f"{given.micro_batches} of {given.micro_batch} x {given.seq} tokens; a rank holds "
            f"{shown_size(round(self.held_bytes(mesh)))} with AdamW's float32 states, and its activations"
        )


def estimate_of(options: EstimateOptions | None) -> Estimate | None:
    """Return the estimate that was asked for, None if none was.

    Errors: LaunchError for a file that cannot be read or lacks a needed size
    """
    if options is None:
        return None
    path = Path(options.model)
    path = path / _CONFIG if path.is_dir() else path
    try:
        config = json.loads(read_named(path))
    except OSError as error:
        raise LaunchError(f"--mesh_estimate=model={options.model}: {path}: {error.strerror}") from None
    except ValueError:
        raise LaunchError(f"--mesh_estimate=model={options.model}: {path} is no JSON") from None
    return Estimate(_sizes_of(config, path), options)


def _sizes_of(config: Any, path: Path) -> ModelSizes:
    """Read a config.json of transformers."""
    given: dict[str, Any] = config if isinstance(config, dict) else {}
    # A model of texts and images keeps the sizes for texts there
    if isinstance(given.get("text_config"), dict):
        given = given["text_config"]

    def number(*names: str, default: int | None = None) -> int:
        found = next((given[name] for name in names if given.get(name) is not None), default)
        if type(found) is not int or found < 1:
            said = "is not there" if found is None else f"is {found!r}"
            raise LaunchError(
                f"--mesh_estimate: {path}: {names[0]} {said}; the estimate needs a config.json of "
                "transformers with hidden_size, num_hidden_layers, num_attention_heads and vocab_size"
            )
        return found

    hidden, blocks = number("hidden_size", "n_embd", "d_model"), number("num_hidden_layers", "n_layer")
    heads = number("num_attention_heads", "n_head")
    kv_heads = number("num_key_value_heads", default=heads)
    head_width = number("head_dim", default=max(hidden // heads, 1))
    inner = number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    matrices = 3 if given.get("hidden_act", given.get("hidden_activation")) in GATED else 2
    attention = 2 * hidden * head_width * (heads + kv_heads)
    vocabulary = number("vocab_size") * hidden * (1 if given.get("tie_word_embeddings") else 2)
    num_experts = next((given[name] for name in ("num_local_experts", "num_experts") if given.get(name)), 0)
    experts = 0
    if num_experts:
        experts = blocks * num_experts * 3 * hidden * number("moe_intermediate_size", default=inner)
    mlp = 0 if num_experts else matrices * hidden * inner
    return ModelSizes(
        hidden=hidden,
        num_blocks=blocks,
        query_width=heads * head_width,
        num_kv_heads=kv_heads,
        head_width=head_width,
        dense=vocabulary + blocks * (attention + mlp),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", default=1) if num_experts else 0,
    )


def _billions(number: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
