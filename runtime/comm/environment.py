"""What the launcher tells a worker in its environment. The only file that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from ..errors import ConfigError

_DEFAULT_TIMEOUT_MIN = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """One process of a job. `local_rank` chooses a device on its host and says nothing about `rank`."""

    rank: int
    local_rank: int
    world_size: int
    is_launched: bool  # False: nothing told us about a job, so this is a single process
    timeout: timedelta  # of one collective


def read_environment(environ: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """Read RANK, LOCAL_RANK, WORLD_SIZE and DEEPSPEED_TIMEOUT (minutes).

    Errors: ConfigError for a value that is no number, or a RANK without WORLD_SIZE
    """
    env = os.environ if environ is None else environ
    is_launched = "RANK" in env and "WORLD_SIZE" in env
    if not is_launched and ("RANK" in env or "WORLD_SIZE" in env):
        given, missing = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
        raise ConfigError(f"{given} is set but {missing} is not; start with dslaunch, or set both or neither")
    return WorkerEnvironment(
        rank=_number(env, "RANK", 0),
        local_rank=_number(env, "LOCAL_RANK", 0),
        world_size=_number(env, "WORLD_SIZE", 1),
        is_launched=is_launched,
        timeout=timedelta(minutes=_number(env, "DEEPSPEED_TIMEOUT", _DEFAULT_TIMEOUT_MIN)),
    )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment: must be a whole number") from None
