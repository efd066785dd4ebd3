"""What has to be so before anything is started: files that are there, memory, a free port, keys that open.

Each is found out in a moment here, and would come after minutes, from the middle of a replica, otherwise.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import socket
import sys
import tempfile
import time
from importlib.machinery import PathFinder
from pathlib import Path

from paceline.cli.run_plan import RunPlan
from paceline.errors import InvalidInput, StrategyError
from paceline.launch.cores import allowed_cores
from paceline.launch.emulate import check_permission
from paceline.machine import check_shared_words, free_memory
from paceline.net.secure import Keys, is_loopback, read_token
from paceline.search.top import is_beside_a_checkpoint

MOST_DEVICES_A_CORE = 4
POD_VARIABLE = "KUBERNETES_SERVICE_HOST"  # is set in every pod of Kubernetes,
POD_NAMES_S = 60.0  # where the name of another pod is known somewhat later than the pod
REPLICA_BYTES = 180 << 20  # a process that has imported torch, before it has a model


def check_script(script: str, *, module: bool = False) -> None:
    """That there is a file to run, or a module."""
    if module:
        name = script.partition(".")[0]
        if PathFinder.find_spec(name, [os.getcwd(), *sys.path]) is None:
            raise InvalidInput("script", _short(script), f"there is no module {_short(name)}, give one as to python -m")
        return
    if os.path.isdir(script):
        raise InvalidInput("script", script, "this is a folder, give the Python file")
    if not os.path.isfile(script):
        folder, name = os.path.split(script)
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(folder or ".")
        near = difflib.get_close_matches(name, names, n=1)
        hint = f", did you mean {Path(folder, near[0])}?" if near else ", give the path of a Python file"
        raise InvalidInput("script", _short(script), f"there is no such file{hint}")
    if not os.access(script, os.R_OK):
        raise InvalidInput("script", script, "it is not readable, give the path of a Python file")


def check(plan: RunPlan, *, inside: bool = False) -> None:
    """That this machine can do what the plan says. `inside`: on an emulated host, which its maker has checked."""
    if plan.save_on_stop is not None:
        _check_save(plan.save_on_stop)
    _check_way_to_servers(plan)
    _check_devices(plan)
    if plan.strategy.exchange == "shared":
        check_shared_words("replicas cannot share memory")
    here = 1 if plan.emulate else plan.hosts
    servers = [host for host in plan.server_hosts if plan.emulate or host == plan.host]
    check_memory(plan.strategy.processes // here, len(servers))
    if plan.rendezvous is not None:
        _check_resolves("rdzv-endpoint", plan.rendezvous)
        if plan.host == 0:
            _check_port(plan.rendezvous)
    if plan.emulate is not None and not inside:
        if numbered := sorted(plan.given_settings & {"hosts", "host", "rendezvous"}):
            raise StrategyError("emulate", plan.emulate, f"it sets {', '.join(numbered)} itself, leave its flag out")
        check_permission()


def _check_save(given: str) -> None:
    """That a checkpoint can be written there, when the run is stopped hours from now."""
    path = Path(given)
    folder = os.path.dirname(os.path.abspath(given))
    if os.path.isdir(given):
        raise InvalidInput("save-on-stop", given, "this is a folder, give the name of a file in it")
    if path.suffix != ".safetensors":
        raise InvalidInput("save-on-stop", _short(given), "give a file name that ends in .safetensors")
    if is_beside_a_checkpoint(path.name):
        raise InvalidInput("save-on-stop", given, "give another name, this one is for files beside a checkpoint")
    if not os.path.isdir(folder):
        raise InvalidInput("save-on-stop", _short(given), "its folder does not exist, make it first")
    try:
        tempfile.TemporaryFile(dir=folder).close()  # permissions do not say it all: a file system may be read-only
    except OSError as error:
        expected = f"its folder cannot be written ({error.strerror}), give another"
        raise InvalidInput("save-on-stop", _short(given), expected) from error
    if len(os.fsencode(path.name)) > 200:  # files beside it have longer names
        raise InvalidInput("save-on-stop", _short(given), "its name is too long, give a shorter one")


def _check_way_to_servers(plan: RunPlan) -> None:
    try:
        if plan.token is not None:
            read_token(Path(plan.token))
        if plan.keys is not None:
            Keys.load(Path(plan.keys)).check("client")
            if plan.meets and plan.host in (0, *plan.server_hosts):
                Keys.load(Path(plan.keys)).check("server")
    except OSError as error:
        field, value = ("token", plan.token) if plan.token is not None else ("keys", plan.keys)
        raise InvalidInput(field, _short(str(value)), f"it cannot be read ({error.strerror}), give another") from error
    for address in plan.join.split(",") if plan.join is not None else ():
        if plan.keys is None and not is_loopback(address.rpartition(":")[0]):
            raise StrategyError("join", address, "beyond this machine give --keys, made by paceline keys make")
        _check_resolves("join", address)


def _check_devices(plan: RunPlan) -> None:
    """A cut that has less than a core for a device would be slower than no cut, and is a slip more often than not."""
    devices, cores = min(plan.strategy.devices, plan.strategy.processes // plan.hosts), len(allowed_cores())
    if devices > 1:
        check_shared_words("a model cannot be cut over devices")
    if devices > 1 and devices > cores * MOST_DEVICES_A_CORE:
        split = plan.strategy.settings["split"]
        raise StrategyError("split", split, f"that needs {devices} devices and this machine has {cores} cores")


def check_memory(replicas: int, servers: int = 0) -> None:
    """More processes than fit would bring down the machine before any of them could say what is wrong."""
    free = free_memory()
    fit, count = free // REPLICA_BYTES, replicas + servers
    if count > max(1, fit):
        expected = (
            f"torch alone takes {count * REPLICA_BYTES / 2**30:.0f} GiB in {count} processes and "
            f"{free / 2**30:.0f} GiB is free, give at most {fit}"
        )
        raise StrategyError(*(("servers", servers) if servers > replicas else ("replicas", replicas)), expected)


def _check_resolves(field: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    patient_until = time.monotonic() + (POD_NAMES_S if POD_VARIABLE in os.environ else 0.0)
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > patient_until:
                why = error.strerror if isinstance(error, OSError) else "it is no name of a host"
                expected = f"its host cannot be found ({why}), give another"
                raise StrategyError(field, _short(address), expected) from error
        time.sleep(0.5)


def _check_port(rendezvous: str) -> None:
    port = int(rendezvous.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "in use" if error.errno == errno.EADDRINUSE else "not allowed"
        expected = f"port {port} is {why} on this host, give another"
        raise StrategyError("rdzv-endpoint", rendezvous, expected) from error


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}…"
