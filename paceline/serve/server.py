"""`paceline serve` as it runs: one process for HTTP, without torch, beside the processes of the model.

    clients ⇄ HTTP (this process) ⇄ shared memory ⇄ processes of the model, forked from the template

Before the port is answered the script has run and the first version is ready. SIGTERM and SIGINT end the server when it
has answered what it has taken; SIGHUP, a new checkpoint in the place of the one before, and a request to load each make
a new version.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from paceline.errors import InvalidInput, PacelineError
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.serve.access_log import AccessLog
from paceline.serve.batching import RequestQueue
from paceline.serve.http_app import HttpApp, HttpSettings
from paceline.serve.model_pool import ModelPool
from paceline.serve.served_tensor import ModelDescription, ServedTensor
from paceline.serve.serving_metrics import ServingMetrics
from paceline.serve.template import Template, TemplateRequest, identity_of
from paceline.split.values import Split

LOOK_S = 0.5  # between looks at the checkpoint's file
KEPT_ALIVE_S = 75  # a connection on which nothing is asked; longer than proxies keep theirs
LONGEST_DRAIN_S = 30


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Everything that can be said to `paceline serve`, read and checked."""

    checkpoint: str
    script: str
    arguments: list[str]
    name: str
    host: str
    port: int
    replicas: int
    split: Split | None
    inputs: list[ServedTensor]
    most_rows: int
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
    with contextlib.closing(_listen(settings.host, settings.port)) as listening:
        uvloop.run(_serve(settings, log, listening))
    return 0


async def _serve(settings: ServeSettings, log: AccessLog, listening: socket.socket) -> None:
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    request = TemplateRequest(
        script=settings.script,
        arguments=settings.arguments,
        with_call=not settings.inputs,
        split=settings.split,
    )
    template = Template(request)
    pool = _pool(settings, template)
    beginning = loop.create_task(_begin(settings, template, pool))
    try:
        if not await _before(beginning, ending):
            return
        description = beginning.result()
        app = HttpApp(
            HttpSettings(settings.name, settings.deadline_s, settings.most_body, settings.token), pool, description, log
        )
        server = _Server(_http_config(settings, app))
        port = listening.getsockname()[1]
        _tell(settings, description, pool, port)
        reload = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        looking = loop.create_task(_look(pool, reload))
        answering = loop.create_task(server.serve([listening]))
        await _before(answering, ending)
        server.should_exit = True
        await answering
        looking.cancel()
    finally:
        beginning.cancel()
        await pool.close()
        await asyncio.to_thread(template.close)


def _pool(settings: ServeSettings, template: Template) -> ModelPool:
    cores = allowed_cores()
    shares: list[tuple[int, ...]] = [share_of_cores(n, settings.replicas, cores) for n in range(settings.replicas)]
    if settings.split is not None:
        shares = [()]  # its devices find theirs
    queue = RequestQueue(settings.most_rows, settings.most_waiting)
    return ModelPool(
        template,
        settings.checkpoint,
        queue,
        ServingMetrics(),
        cores=shares,
        deadline_s=settings.deadline_s,
        note=_say,
    )


async def _begin(settings: ServeSettings, template: Template, pool: ModelPool) -> ModelDescription:
    """Returns what the model is, when the first version is ready."""
    description = await asyncio.to_thread(template.open)
    if settings.inputs:
        description = msgspec.structs.replace(description, inputs=settings.inputs)
    await pool.load()
    return description


async def _before(work: asyncio.Task[object], ending: asyncio.Event) -> bool:
    """Waits for the work, or until the server is to end; returns whether the work was done first."""
    told = asyncio.ensure_future(ending.wait())
    await asyncio.wait((work, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    return work.done()


async def _look(pool: ModelPool, reload: asyncio.Event) -> None:
    """Loads a new version when the file has changed or a signal has come; ends processes that are stuck."""
    seen = pool.loaded
    while True:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reload.wait(), LOOK_S)
        pool.kill_the_stuck()
        now = identity_of(pool.path)
        settled, seen = now == seen, now  # one that is being written is left alone until it rests
        if reload.is_set() or (settled and now is not None and now != pool.loaded and pool.version is not None):
            reload.clear()
            try:
                _say(f"version {await pool.load()} of {pool.path} answers from now on")
            except PacelineError as error:
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
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
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


def _tell(settings: ServeSettings, description: ModelDescription, pool: ModelPool, port: int) -> None:
    takes = ", ".join(f"{spec.name} {spec.datatype} {spec.shape}" for spec in description.inputs or ())
    processes = len(pool.processes)
    how = f"cut over {settings.split.devices} devices" if settings.split is not None else f"{processes} processes"
    _say(
        f"{settings.name} ({description.kind} of {Path(settings.checkpoint).name}, takes {takes or 'not known yet'}) "
        f"answers at {settings.address}:{port}, {how if processes > 1 or settings.split is not None else '1 process'}"
    )
    if settings.json:
        told = {
            "address": f"{settings.address}:{port}",
            "port": port,
            "process": os.getpid(),
            "name": settings.name,
            "version": pool.version,
            "processes": pool.processes,
            "model": description,
        }
        print(msgspec.json.encode(told).decode(), flush=True)


def _say(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr, flush=True)
