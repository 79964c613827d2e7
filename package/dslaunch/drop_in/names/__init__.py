"""The table of DeepSpeed's names: every module, every public name in it, and what became of it here.

The modules of the package `deepspeed` serve it (serve.py), the compatibility page is written from it, and a
test holds both and DeepSpeed 0.19.8 itself against it.
"""

from __future__ import annotations

from .absent import ABSENT
from .asked import ASKED
from .beside import BESIDE
from .inference import INFERENCE_MODULES
from .pipelines import PIPELINE
from .sequences import SEQUENCES
from .table import Module
from .top import TOP
from .training import TRAINING

MODULES: dict[str, Module] = {
    module.name: module
    for module in (*TOP, *TRAINING, *PIPELINE, *BESIDE, *SEQUENCES, *INFERENCE_MODULES, *ASKED, *ABSENT)
}
