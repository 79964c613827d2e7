"""Models of public repositories that are not here: read from a folder that PUBLIC_SOURCES names, which has
checkouts as OWNER/NAME. Nothing of them is in this project; without the folder there are no such rows.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.runtime.plan.programs import DEPTH, LENGTH, PROGRAMS, VOCAB, WIDTH, Config, Program, train

PUBLIC_SOURCES = "PUBLIC_SOURCES"
_HEADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicModel:
    """A class of a file, made small. `blocks` names the list of its like layers."""

    repository: str
    file: str
    make: Callable[[Any], nn.Module]  # of the file's module
    loss_of: Callable[[Any, Tensor], Tensor]
    blocks: str

    @property
    def name(self) -> str:
        """Return the name of its rows, which tells the commit of the checkout."""
        return f"{self.repository} {commit_of(self.repository)}: {self.file}"

    def made(self) -> nn.Module:
        """Return the model with random weights."""
        with redirect_stdout(StringIO()):  # some tell their size
            return self.make(_module(self.repository, self.file))


def folder_of(repository: str) -> Path:
    """Return where its checkout is."""
    return Path(os.environ[PUBLIC_SOURCES], repository)


def commit_of(repository: str) -> str:
    """Return the short name of its commit."""
    words = ["git", "-C", str(folder_of(repository)), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def _module(repository: str, file: str) -> Any:
    path = folder_of(repository) / file
    if str(folder_of(repository)) not in sys.path:
        sys.path.append(str(folder_of(repository)))  # its own package
    name = f"public_{abs(hash((repository, file)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AssertionError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def _nano_gpt(module: Any) -> nn.Module:
    sizes = {"block_size": LENGTH, "vocab_size": VOCAB, "n_layer": DEPTH, "n_head": _HEADS, "n_embd": WIDTH}
    model: nn.Module = module.GPT(module.GPTConfig(**sizes))
    return model


def _min_gpt(module: Any) -> nn.Module:
    config = module.GPT.get_default_config()
    config.model_type = None
    config.block_size, config.vocab_size = LENGTH, VOCAB
    config.n_layer, config.n_head, config.n_embd = DEPTH, _HEADS, WIDTH
    model: nn.Module = module.GPT(config)
    return model


def _toy(module: Any) -> nn.Module:
    sizes = {"n_layers": DEPTH, "vocab_size": VOCAB, "max_seq_len": LENGTH, "dim": WIDTH, "n_heads": _HEADS}
    model: nn.Module = module.Transformer(module.ModelArgs(**sizes))
    return model


def _llama(module: Any) -> nn.Module:
    sizes = {"dim": WIDTH, "n_layers": DEPTH, "n_heads": _HEADS, "n_kv_heads": 2, "vocab_size": VOCAB}
    model: nn.Module = module.Transformer(module.ModelArgs(**sizes, max_seq_len=LENGTH))
    return model


def _own_loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, tokens)[1]
    return loss


def _loss_of_scores(model: Any, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


PUBLIC_MODELS = (
    PublicModel(
        repository="karpathy/nanoGPT",
        file="model.py",
        make=_nano_gpt,
        loss_of=_own_loss,
        blocks="transformer.h",
    ),
    PublicModel(
        repository="karpathy/minGPT",
        file="mingpt/model.py",
        make=_min_gpt,
        loss_of=_own_loss,
        blocks="transformer.h",
    ),
    PublicModel(
        repository="pytorch/examples",
        file="distributed/FSDP2/model.py",
        make=_toy,
        loss_of=_loss_of_scores,
        blocks="layers",
    ),
    PublicModel(
        repository="pytorch/examples",
        file="distributed/tensor_parallelism/llama2_model.py",
        make=_llama,
        loss_of=_loss_of_scores,
        blocks="layers",
    ),
)


def public_models() -> dict[str, PublicModel]:
    """Return those whose checkouts are there, by the name of their rows."""
    if PUBLIC_SOURCES not in os.environ:
        return {}
    return {one.name: one for one in PUBLIC_MODELS if (folder_of(one.repository) / one.file).exists()}


def program_of(name: str) -> Program:
    """Return the program of a row."""
    if name in PROGRAMS:
        return PROGRAMS[name]
    return partial(_train, model=public_models()[name])


def _train(config: Config, model: PublicModel) -> None:
    train(model.made(), config, model.loss_of)
