"""The section `autotuning` of a ds_config: what each key means to trials, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.autotuning import Autotuning, read_autotuning


def test_keys_are_read() -> None:
    assert read_autotuning(None) == Autotuning()
    found = read_autotuning(
        {
            "enabled": True,
            "metric": "latency",
            "start_profile_step": 2,
            "end_profile_step": 8,
            "results_dir": "results",
            "overwrite": True,
            "tuner_num_trials": 4,
            "mp_size": 2,
            "max_train_batch_size": 64,
            "min_train_micro_batch_size_per_gpu": 2,
            "arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"},
        }
    )
    assert (found.metric, found.warm_up, found.steps, found.num_trials) == ("latency", 2, 6, 4)
    assert (found.results_dir, found.is_afresh, found.num_tensor_parts) == (Path("results"), True, 2)
    assert (found.batches[1], found.micro_batches[0]) == (64, 2)
    assert found.arg_mappings == (("train_micro_batch_size_per_gpu", "--per_device_train_batch_size"),)
    assert found.notes == ()


def test_a_key_without_effect_is_told() -> None:
    found = read_autotuning({"enabled": True, "tuner_type": "gridsearch", "start_profile_step": 4})
    assert found.notes == ("autotuning.tuner_type has no effect: rehearsals say which configurations run",)
    assert (found.warm_up, found.steps) == (4, 1)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"metric": "flops"}, "autotuning.metric 'flops': must be throughput, samples a second, or latency"),
        ({"metric_path": "a"}, "autotuning.metric_path 'a': is not here; results_dir has what was measured"),
        (
            {"tuner_num_trial": 3},
            "autotuning.tuner_num_trial: there is no such key; did you mean tuner_num_trials?",
        ),
        ({"mp_size": "auto"}, "autotuning.mp_size 'auto': must be a whole number above 0"),
        ({"end_profile_step": 3}, "autotuning.end_profile_step '3': must be more than start_profile_step"),
        ({"arg_mappings": {"a": 3}}, "must name for keys of the ds_config the script's arguments"),
        ([], "autotuning '[]': must be an object of JSON"),
    ],
)
def test_what_is_not_here_is_refused(section: Any, message: str) -> None:
    with pytest.raises(LaunchError) as refused:
        read_autotuning(section)
    assert message in str(refused.value)
