"""`paceline serve` as it runs: one process for HTTP, without torch, beside the processes of the model.

    clients ⇄ HTTP (this process) ⇄ shared memory ⇄ processes of the model, forked from the template

Before the port is answered the script has run and the first version is ready. SIGTERM and SIGINT end the server when it
has answered what it has taken; SIGHUP, a new checkpoint in the place of the one before, steps of a training that is
followed, and a request to load each make a new version.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from paceline.combining import Combination
from paceline.errors import InvalidInput, LaunchError, PacelineError
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.net.secure import is_loopback
from paceline.serve.access_log import AccessLog
from paceline.serve.batching import RequestQueue
from paceline.serve.ensemble_pool import EnsemblePool
from paceline.serve.followed_container import FollowedContainer, FollowRequest
from paceline.serve.http_app import HttpApp, HttpSettings
from paceline.serve.model_pool import ModelPool
from paceline.serve.quick_protocol import QuickProtocol
from paceline.serve.served_model import ServedModel
from paceline.serve.served_tensor import ANY, ModelDescription, ServedTensor
from paceline.serve.serving_metrics import ServingMetrics
from paceline.serve.short_slice import SHORTEST_NS, run_in_slices
from paceline.serve.template import Template, TemplateRequest
from paceline.serve.version_source import FileSource, VersionSource
from paceline.split.values import Split
from paceline.trial_values import TrialPlace

LOOK_S = 0.5  # between looks at where new versions come from
KEPT_ALIVE_S = 75  # a connection on which nothing is asked; longer than proxies keep theirs
LONGEST_DRAIN_S = 30


@dataclass(frozen=True, kw_only=True)
class ServedMember:
    """A checkpoint, and what its model is made with; its name is told if there are several."""

    name: str
    checkpoint: str
    arguments: list[str]
    trial: TrialPlace | None = None


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Everything that can be said to `paceline serve`, read and checked."""

    members: list[ServedMember]  # none: a container is followed
    ensemble: tuple[Combination, int] | None  # with its quorum
    follow: tuple[FollowRequest, float] | None  # with the least seconds between two versions
    script: str
    arguments: list[str]
    name: str
    host: str
    port: int
    replicas: int
    split: Split | None
    inputs: list[ServedTensor]
    most_rows: int
    pad: bool
    deadline_s: float
    most_waiting: int
    most_body: int
    token: str | None
    tls: tuple[str, str] | None  # the files of the certificate and of the key
    access_log: str | None
    json: bool

    @property
    def address(self) -> str:
        """Returns where it is, but for the port."""
        return f"{'https' if self.tls is not None else 'http'}://{self.host}"


def run(settings: ServeSettings) -> int:
    """Serves until it is told to end; returns the exit code."""
    if settings.tls is not None:
        _check_tls(*settings.tls)
    log = AccessLog(settings.access_log)
    run_in_slices(SHORTEST_NS)
    with contextlib.closing(_listen(settings.host, settings.port)) as listening:
        uvloop.run(_serve(settings, log, listening))
    return 0


async def _serve(settings: ServeSettings, log: AccessLog, listening: socket.socket) -> None:
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    templates = _templates(settings)
    model = _model(settings, templates)
    beginning = loop.create_task(_begin(settings, templates, model))
    try:
        if not await _before(beginning, ending):
            return
        description = beginning.result()
        app = HttpApp(
            HttpSettings(
                settings.name,
                settings.deadline_s,
                settings.most_body,
                settings.token,
                only_local=is_loopback(listening.getsockname()[0]),
            ),
            model,
            description,
            log,
        )
        server = _Server(_http_config(settings, app))
        port = listening.getsockname()[1]
        _tell(settings, description, model, port)
        reload = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        looking = loop.create_task(_look(model, reload))
        gc.collect()
        gc.freeze()  # what was made so far stays; Python's collector need not look at it again
        answering = loop.create_task(server.serve([listening]))
        await _before(answering, ending)
        server.should_exit = True
        await answering
        looking.cancel()
        app.close()
    finally:
        beginning.cancel()
        await model.close()
        await asyncio.gather(*(asyncio.to_thread(template.close) for template in set(templates)))


def _templates(settings: ServeSettings) -> list[Template]:
    """Returns the template of each member; those that are made alike have one in common."""
    made: dict[bytes, Template] = {}
    found = []
    for arguments, trial in [(one.arguments, one.trial) for one in settings.members] or [(settings.arguments, None)]:
        request = TemplateRequest(
            script=settings.script,
            arguments=arguments,
            with_call=not settings.inputs,
            trial=trial,
            split=settings.split,
        )
        found.append(made.setdefault(msgspec.msgpack.encode(request), Template(request)))
    return found


def _model(settings: ServeSettings, templates: Sequence[Template]) -> ServedModel:
    """Returns what answers: a pool of processes, or of an ensemble one for each member, which share the cores."""
    cores, count, metrics = allowed_cores(), len(templates) * settings.replicas, ServingMetrics()
    if count < len(cores):  # each has one thread: one core can be left to this process, which is in every request's way
        cores = cores[1:]
    pads = [spec.name for spec in settings.inputs if settings.pad and ANY in spec.shape[1:]]

    def pool(at: int, source: VersionSource) -> ModelPool:
        own = range(at * settings.replicas, (at + 1) * settings.replicas)
        return ModelPool(
            templates[at],
            source,
            RequestQueue(settings.most_rows, settings.most_waiting),
            metrics,
            cores=[share_of_cores(number, count, cores) for number in own] if settings.split is None else [()],
            deadline_s=settings.deadline_s,
            note=_say,
            member=settings.members[at].name if settings.ensemble is not None else "",
            pads=pads,
        )

    if settings.follow is not None:
        return pool(0, FollowedContainer(*settings.follow))
    pools = {one.name: pool(at, FileSource(one.checkpoint)) for at, one in enumerate(settings.members)}
    if settings.ensemble is None:
        return pools[settings.members[0].name]
    return EnsemblePool(pools, *settings.ensemble, metrics)


async def _begin(settings: ServeSettings, templates: Sequence[Template], model: ServedModel) -> ModelDescription:
    """Returns what the model is, when the first version is ready."""
    unlike = list(dict.fromkeys(templates))
    described = await asyncio.gather(*(asyncio.to_thread(template.open) for template in unlike))
    if settings.inputs:
        described = [msgspec.structs.replace(one, inputs=settings.inputs, declared=True) for one in described]
    description = described[0]
    if settings.ensemble is not None:
        by_template = dict(zip(unlike, described, strict=True))
        _check_members({one.name: by_template[it] for one, it in zip(settings.members, templates, strict=True)})
    await model.load()
    return description


def _check_members(described: Mapping[str, ModelDescription]) -> None:
    """Raises of members that cannot be asked the same, or whose answers cannot be put together."""
    first, *_ = described
    for name, one in described.items():
        if one.inputs != described[first].inputs:
            takes, others = one.takes, described[first].takes
            raise LaunchError(f"member {name} takes {takes}, and {first} {others}: give models for the same inputs")
        if one.outputs is not None and len(one.outputs) != 1:
            gives = ", ".join(spec.name for spec in one.outputs)
            raise LaunchError(f"member {name} gives {gives}: let it return one tensor, which can be combined")


async def _before(work: asyncio.Task[object], ending: asyncio.Event) -> bool:
    """Waits for the work, or until the server is to end; returns whether the work was done first."""
    told = asyncio.ensure_future(ending.wait())
    await asyncio.wait((work, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    return work.done()


async def _look(model: ServedModel, reload: asyncio.Event) -> None:
    """Has the model look for what has changed, and loads all of it when a signal has come."""
    while True:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reload.wait(), LOOK_S)
        try:
            if not reload.is_set():
                await model.look()
                continue
            reload.clear()
            _say(f"version {await model.load()} answers from now on")
        except (PacelineError, OSError) as error:
            _say(f"a new version was not loaded, and all is as it was: {error}")


class _Server(uvicorn.Server):
    """uvicorn, with signals that are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_config(settings: ServeSettings, app: HttpApp) -> uvicorn.Config:
    certificate, key = settings.tls if settings.tls is not None else (None, None)
    return uvicorn.Config(
        app,
        http=QuickProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody is believed who says that he asks for somebody else
        timeout_keep_alive=KEPT_ALIVE_S,
        timeout_graceful_shutdown=LONGEST_DRAIN_S,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise InvalidInput(
                "port", port, f"it is in use on {host}, give another, or 0 for any that is free"
            ) from error
        if isinstance(error, OSError) and error.errno == errno.EACCES:
            raise InvalidInput("port", port, "this user may not have it, give one from 1024 up") from error
        why = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise InvalidInput("host", host[:100], f"it is no address of this machine ({why}), give another") from error


def _check_tls(certificate: str, key: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        what = f"{error.strerror or error}"
        raise InvalidInput("tls-cert", certificate, f"it and {key} are no certificate and its key ({what})") from error


def _tell(settings: ServeSettings, description: ModelDescription, model: ServedModel, port: int) -> None:
    count = len(model.processes)
    how = f"{count} processes" if count > 1 else "1 process"
    if settings.split is not None:
        how = f"cut over {settings.split.devices} devices"
    if settings.ensemble is not None:
        combination, quorum = settings.ensemble
        how = f"{combination.how} of {len(settings.members)} members, {quorum} of them at least, {how}"
    files = ", ".join(Path(member.checkpoint).name for member in settings.members)
    source = files if settings.follow is None else settings.follow[0].words
    _say(
        f"{settings.name} ({description.kind} of {source}, takes {description.takes}) "
        f"answers at {settings.address}:{port}, {how}"
    )
    if settings.json:
        told = {
            "address": f"{settings.address}:{port}",
            "port": port,
            "process": os.getpid(),
            "name": settings.name,
            "version": model.version,
            "processes": model.processes,
            "model": description,
        }
        print(msgspec.json.encode(told).decode(), flush=True)


def _say(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr, flush=True)
