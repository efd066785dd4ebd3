"""`paceline run --on ray|slurm|kubernetes`: from a plan to the hosts of an engine."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial

from paceline.cli import complain
from paceline.cli.run_plan import RunPlan
from paceline.engines.driver import Driver
from paceline.engines.setting import EngineHosts, EngineSetting, read_runtime_env, which_engine
from paceline.errors import StrategyError
from paceline.net.secure import new_token
from paceline.watch.output import put
from paceline.watch.run_folder import choose_run_folder


def run_on_engine(plan: RunPlan) -> int:
    """One more `paceline run` on each node; for Kubernetes, what has that done."""
    setting = engine_setting(plan)
    token = new_token() if plan.meets and plan.token is None and plan.keys is None else None
    if setting.engine == "kubernetes":
        return _write_manifest(plan, setting, token)
    folder = choose_run_folder(plan.run_folder, plan.name)  # whose name is free here, and so on a disk that all share
    try:
        hosts = _hosts(setting)
        try:
            commands = partial(_command, plan, str(folder))
            driver = Driver(hosts, setting, commands, meet=plan.meets, quiet=plan.quiet)
            return driver.run(folder=_working_folder(setting), token=token)
        finally:
            hosts.close()
    finally:
        with contextlib.suppress(OSError):  # it is not empty: this disk is one of a host
            folder.rmdir()


def engine_setting(plan: RunPlan) -> EngineSetting:
    """What is asked of the engine."""
    assert plan.on is not None
    engine, address = which_engine(plan.on)
    servers = max((plan.server_hosts.count(host) for host in plan.server_hosts), default=0)
    processes = plan.strategy.processes // plan.hosts + servers
    return EngineSetting(
        engine=engine,
        address=address,
        hosts=plan.hosts,
        cores=plan.cores_per_node or processes,
        cores_given=plan.cores_per_node is not None,
        gpus=plan.gpus_per_node if plan.gpus_per_node is not None else (plan.devices or "").count("cuda"),
        runtime_env=plan.runtime_env,
        srun=plan.srun,
        image=plan.image,
        manifest=plan.manifest or "jobset",
        timeout_s=plan.strategy.timeout_s,
    )


def _hosts(setting: EngineSetting) -> EngineHosts:
    if setting.engine == "ray":
        from paceline.engines.on_ray import RayHosts  # which needs Ray

        return RayHosts(setting)
    from paceline.engines.on_slurm import SlurmHosts

    return SlurmHosts(setting)


def _write_manifest(plan: RunPlan, setting: EngineSetting, token: str | None) -> int:
    from paceline.engines.on_kubernetes import how_to_apply, manifest_of

    if setting.manifest == "trainjob" and token is not None:
        expected = "servers need a secret, give --token with a file that the image has, or --manifest jobset"
        raise StrategyError("manifest", setting.manifest, expected)
    commands = partial(_command, plan, plan.run_folder)
    put(sys.stdout, manifest_of(setting, plan.name, commands, token).encode())
    if not plan.quiet:
        complain(how_to_apply(setting, plan.name))
    return 0


def _command(plan: RunPlan, folder: str | None, host: int, rendezvous: str) -> list[str]:
    return plan.on_engine_host(host, rendezvous, folder).command()


def _working_folder(setting: EngineSetting) -> str | None:
    """Where the hosts run: here, as it is called everywhere; or where Ray puts the files that it was told to send."""
    sent = setting.runtime_env is not None and "working_dir" in read_runtime_env(setting.runtime_env)
    return None if sent else os.getcwd()
