"""What was asked of an engine, and what an engine is to the driver."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.engines.messages import FromAgent, FromDriver, HostGone
from paceline.errors import StrategyError, nearest_first

ENGINES = ("ray", "slurm", "kubernetes")
MANIFESTS = ("jobset", "trainjob")


@dataclass(frozen=True)
class EngineSetting:
    """On which cluster the hosts are, and what each of them is."""

    engine: str
    address: str | None  # of the cluster, if it was given
    hosts: int
    cores: int  # asked for on each host
    cores_given: bool = False
    gpus: int = 0
    runtime_env: str | None = None  # of Ray
    srun: str | None = None  # more flags for it
    image: str | None = None  # of the containers
    manifest: str = "jobset"
    timeout_s: float = 600.0


class EngineHosts(Protocol):
    """The hosts that an engine has given us, with an agent on each or on its way there."""

    def fileno(self) -> int:
        """Readable when there may be something to read."""

    def read(self) -> list[FromAgent | HostGone]:
        """What has come since the last look."""

    def send(self, message: FromDriver) -> None:
        """To the agent that the message names."""

    def close(self) -> None:
        """Give everything back; whatever still runs ends."""


def which_engine(given: str) -> tuple[str, str | None]:
    """The engine's name, and its address if one stands behind it.

    >>> which_engine("ray:10.0.0.1:6379"), which_engine("slurm")
    (('ray', '10.0.0.1:6379'), ('slurm', None))
    """
    name, colon, address = given.partition(":")
    if name not in ENGINES:
        raise StrategyError("on", given, f"give one of {', '.join(nearest_first(name, ENGINES))}")
    if colon and (name != "ray" or not address):
        raise StrategyError(
            "on", given, "an address belongs to Ray, such as ray:10.0.0.1:6379, give slurm or kubernetes"
        )
    return name, address or None


def read_runtime_env(given: str) -> dict[str, Any]:
    """Ray's runtime_env: JSON, or a file that holds it.

    >>> read_runtime_env('{"working_dir": "."}')
    {'working_dir': '.'}
    """
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            expected = (
                f'it cannot be read ({why}), give JSON such as \'{{"working_dir": "."}}\', or a file that holds it'
            )
            raise StrategyError("runtime-env", given[:100], expected) from error
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        expected = f'that is no JSON ({error}), give such as \'{{"working_dir": "."}}\''
        raise StrategyError("runtime-env", given[:100], expected) from error
    if not isinstance(read, dict):
        raise StrategyError("runtime-env", given[:100], 'give a JSON object, such as \'{"working_dir": "."}\'')
    return read


def read_srun(given: str) -> list[str]:
    """More flags for srun, without their dashes, which would be taken for ours.

    >>> read_srun("partition=gpu time=60 exclusive")
    ['--partition=gpu', '--time=60', '--exclusive']
    """
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise StrategyError("srun", given, f"a quotation mark has no end ({error}), close it") from error
    if not words:
        raise StrategyError("srun", given, "give flags of srun, such as 'partition=gpu time=60'")
    return [word if word.startswith("-") else f"--{word}" for word in words]


def allocated_nodes() -> int | None:
    """How many nodes Slurm has given to the job that this process is part of, if it is part of one."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return int(nodes) if nodes.isdigit() and "SLURM_JOB_ID" in os.environ else None


def allocated_cores() -> int | None:
    """How many cores that job has on each of its nodes; where it has more on some, the least."""
    counts = re.findall(r"(?:^|,)(\d+)", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # such as 4(x2),2
    return min(map(int, counts)) if counts and allocated_nodes() is not None else None
