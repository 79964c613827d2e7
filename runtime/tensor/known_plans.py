"""Plans for models of transformers that have no tp_plan of their own.

Names are the ends of modules' names. Where attention keeps its number of heads in an attribute, its style is
"local_heads".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import nn

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def _attention(name: str, columns: str, row: str) -> dict[str, str]:
    return {
        name: "local_heads",
        **{f"{name}.{one}": "colwise" for one in columns.split()},
        f"{name}.{row}": "rowwise",
    }


_QKV = "q_proj k_proj v_proj"
_BART = {
    **_attention("self_attn", _QKV, "out_proj"),
    **_attention("encoder_attn", _QKV, "out_proj"),
    "fc1": "colwise",
    "fc2": "rowwise",
}
_BERT = {
    "attention.self.query": "colwise",
    "attention.self.key": "colwise",
    "attention.self.value": "colwise",
    "intermediate.dense": "colwise",
    "output.dense": "rowwise",
}
_T5 = {
    **_attention("SelfAttention", "q k v", "o"),
    **_attention("EncDecAttention", "q k v", "o"),
    "SelfAttention.relative_attention_bias": "embedding_heads",
    **{f"DenseReluDense.{one}": "colwise" for one in ("wi", "wi_0", "wi_1")},
    "DenseReluDense.wo": "rowwise",
}
_GPT2 = {
    "attn": "local_heads",
    "attn.c_attn": "conv1d_packed_3_colwise",
    "attn.c_proj": "conv1d_rowwise",
    "crossattention": "local_heads",
    "crossattention.q_attn": "conv1d_colwise",
    "crossattention.c_attn": "conv1d_packed_2_colwise",
    "crossattention.c_proj": "conv1d_rowwise",
    "mlp.c_fc": "conv1d_colwise",
    "mlp.c_proj": "conv1d_rowwise",
}
_WAV2VEC2 = {
    **_attention("attention", _QKV, "out_proj"),
    "feed_forward.intermediate_dense": "colwise",
    "feed_forward.output_dense": "rowwise",
}
_GPT_NEO = {
    **_attention("attn.attention", _QKV, "out_proj"),
    "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
}
_GPT_J = {**_attention("attn", _QKV, "out_proj"), "mlp.fc_in": "colwise", "mlp.fc_out": "rowwise"}
KNOWN_PLANS: Mapping[str, Mapping[str, str]] = {  # by model_type
    "bart": _BART,
    "bert": _BERT,
    "gpt2": _GPT2,
    "gpt_neo": _GPT_NEO,
    "gptj": _GPT_J,
    "mbart": _BART,
    "mt5": _T5,
    "opt": _BART,
    "roberta": _BERT,
    "t5": _T5,
    "wav2vec2": _WAV2VEC2,
    "whisper": _BART,
}


def known_plan(module: nn.Module) -> Mapping[str, str]:
    """Return the plan for a model of these kinds, in the form of a tp_plan; {} for any other."""
    ends = KNOWN_PLANS.get(str(getattr(getattr(module, "config", None), "model_type", "")), {})
    names: Iterable[str] = (_NUMBER.sub(".*", name) for name, _ in module.named_modules()) if ends else ()
    return {name: style for name in names for end, style in ends.items() if name.endswith(f".{end}")}
