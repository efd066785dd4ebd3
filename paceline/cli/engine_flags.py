"""The flags of `paceline run` about engines: on whose nodes the hosts of a run are, and what is asked of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from paceline.cli import whole
from paceline.engines.setting import MANIFESTS, allocated_nodes, read_runtime_env, read_srun, which_engine
from paceline.errors import StrategyError
from paceline.strategy import one_of

# By name; those that belong to some engines alone, with these.
ENGINE_FLAGS: dict[str, tuple[str, ...]] = {
    "on": (),
    "cores_per_node": ("ray", "slurm", "kubernetes"),
    "gpus_per_node": ("ray", "slurm", "kubernetes"),
    "runtime_env": ("ray",),
    "srun": ("slurm",),
    "image": ("kubernetes",),
    "manifest": ("kubernetes",),
}
_SET_BY_ENGINES = ("host", "rdzv_endpoint", "master_addr", "master_port", "emulate")
_IMAGE = re.compile(r"[\w][\w./:@-]{0,254}")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the machines come from."""
    group = parser.add_argument_group("machines of a cluster")
    group.add_argument("--on", metavar="ENGINE", help="ray, ray:ADDRESS, slurm; kubernetes writes a manifest")
    group.add_argument(
        "--cores-per-node", type=whole("cores-per-node", 1), metavar="N", help="to ask for, default one a process"
    )
    group.add_argument(
        "--gpus-per-node",
        type=whole("gpus-per-node", 0),
        metavar="N",
        help="to ask for, default one for each cuda of --devices",
    )
    group.add_argument("--runtime-env", metavar="JSON", help='of Ray, such as \'{"working_dir": "."}\', or a file')
    group.add_argument("--srun", metavar="FLAGS", help="more of srun's, such as 'partition=gpu time=60'")
    group.add_argument("--image", metavar="NAME", help="of the containers, with Paceline and the script in it")
    group.add_argument("--manifest", metavar="KIND", help="of Kubernetes: jobset (default) or trainjob")


def check_engine(given: Mapping[str, Any]) -> None:
    """A sentence for whatever contradicts."""
    if "on" not in given:
        for flag, engines in ENGINE_FLAGS.items():
            if flag in given:
                expected = f"it is asked of an engine, add --on {' or '.join(engines[:2])}, or leave it out"
                raise StrategyError(flag.replace("_", "-"), given[flag], expected)
        return
    engine, _ = which_engine(given["on"])
    for flag in _SET_BY_ENGINES:
        if flag in given:
            name = "node-rank" if flag == "host" else flag.replace("_", "-")
            raise StrategyError("on", given["on"], f"the engine says which host is where, leave out --{name}")
    for flag, engines in ENGINE_FLAGS.items():
        if flag in given and engines and engine not in engines:
            name = flag.replace("_", "-")
            raise StrategyError(name, given[flag], f"it is for --on {engines[0]}, and this is {engine}, leave it out")
    if "runtime_env" in given:
        read_runtime_env(given["runtime_env"])
    if "srun" in given:
        read_srun(given["srun"])
    if "manifest" in given:
        one_of("manifest", given["manifest"], MANIFESTS)
    if engine == "kubernetes":
        if "image" not in given:
            raise StrategyError("on", given["on"], "say what the containers are made of, --image NAME")
        if not _IMAGE.fullmatch(given["image"]):
            raise StrategyError("image", given["image"], "give the name of an image, such as registry/train:1")


def hosts_by_default(given: Mapping[str, Any]) -> int:
    """How many hosts there are if nobody says: all nodes of the Slurm job that this is in, or one."""
    return (allocated_nodes() or 1) if given.get("on") == "slurm" else 1
