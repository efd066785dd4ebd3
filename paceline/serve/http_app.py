"""The server's HTTP: which address answers what. What a request means is the protocols' files', and who computes it
`model_pool`'s.

Every error is JSON with one sentence, `{"error": …}`, also where no route fits. A request is read up to a bound, must
be allowed in if there is a token, has a deadline, and is given up when its client has gone away.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version as version_of
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.serve.access_log import AccessLog
from paceline.serve.for_people import read_predict, write_predict
from paceline.serve.model_pool import ModelPool, ServedAnswer
from paceline.serve.open_inference import (
    common_rows,
    config,
    decode_json,
    metadata,
    read_infer,
    shape_of,
    specs_of,
    write_answer,
)
from paceline.serve.openapi import openapi, openapi_page
from paceline.serve.request_error import BAD, TOO_LARGE, UNAUTHORIZED, UNKNOWN, RequestError, bad
from paceline.serve.served_tensor import ModelDescription, ServedTensor

MOST_DEADLINE_S = 3600.0
OPEN_TO_ALL = ("/", "/v2/health/live", "/v2/health/ready")  # without a token: a page without data, and probes
_EXTENSIONS = ["binary_tensor_data", "model_repository", "model_configuration"]
_JSON = "application/json"


@dataclass(frozen=True)
class HttpSettings:
    """What was asked for at the start."""

    name: str
    deadline_s: float
    most_body: int
    token: str | None = None


class HttpApp:
    """An ASGI application for one model."""

    def __init__(self, settings: HttpSettings, pool: ModelPool, description: ModelDescription, log: AccessLog) -> None:
        self._settings, self._pool, self._description, self._log = settings, pool, description, log
        self._inputs, self._outputs = description.inputs, description.outputs
        routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [("POST", "/predict", self._predict)]
        for at in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            routes += [
                ("POST", f"{at}/infer", self._infer),
                ("GET", at, self._metadata),
                ("GET", f"{at}/ready", self._model_ready),
                ("GET", f"{at}/config", self._config),
            ]
        routes += [
            ("GET", "/", self._page),
            ("GET", "/docs", self._docs),
            ("GET", "/openapi.json", self._openapi),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v2", self._server),
            ("GET", "/v2/health/live", self._live),
            ("GET", "/v2/health/ready", self._ready),
            ("POST", "/v2/repository/index", self._index),
            ("POST", "/v2/repository/models/{model}/load", self._load),
            ("POST", "/v2/repository/models/{model}/unload", self._unload),
        ]
        self._app = Starlette(
            routes=[Route(path, self._handled(endpoint), methods=[method]) for method, path, endpoint in routes],
            exception_handlers={HTTPException: _no_route},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; every one is counted, timed and logged here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, size = time.perf_counter(), 0, 0

        async def note(message: Any) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            seconds = time.perf_counter() - began
            self._pool.metrics.requests.labels(str(status or "gone")).inc()
            self._pool.metrics.request_seconds.observe(seconds)
            self._log.write(scope, status, seconds, size)

    def _handled(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                self._let_in(request)
                return await endpoint(request)
            except RequestError as error:
                return _failed(error.status, str(error), error.retry_after_s)
            except (ClientDisconnect, _GoneAway):
                return Response(status_code=499)

        return handle

    def _let_in(self, request: Request) -> None:
        token = self._settings.token
        if token is None or request.url.path in OPEN_TO_ALL:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {token}".encode()):
            raise RequestError(UNAUTHORIZED, "this server wants a token: send Authorization: Bearer TOKEN")

    # ── answering ────────────────────────────────────────────────────────────────────────────────────────────

    async def _infer(self, request: Request) -> Response:
        version = self._checked(request)
        body = await self._body(request)
        asked = read_infer(body, _header_length(request), self._inputs)
        answer = await self._computed(request, asked.inputs, version)
        data, length = write_answer(self._settings.name, answer.version, asked, answer.outputs)
        headers = _about(answer)
        if length is not None:
            headers["Inference-Header-Content-Length"] = str(length)
        return Response(data, headers=headers, media_type=_JSON if length is None else "application/octet-stream")

    async def _predict(self, request: Request) -> Response:
        body = await self._body(request)
        asked = read_predict(body, request.headers.get("content-type", ""), self._inputs)
        answer = await self._computed(request, asked.inputs, None)
        told = {
            "answered_by": answer.process,
            "together": answer.requests,
            "waited_s": answer.waited_s,
            "computed_s": answer.computed_s,
        }
        data = write_predict(self._settings.name, answer.version, asked, answer.outputs, told)
        return Response(data, headers=_about(answer), media_type=_JSON)

    async def _computed(self, request: Request, inputs: dict[str, Any], version: int | None) -> ServedAnswer:
        rows = common_rows(inputs) if self._description.in_rows else 0
        deadline_s = self._deadline(request)
        computing = asyncio.ensure_future(self._pool.answer(inputs, shape_of(inputs), rows, deadline_s, version))
        leaving = asyncio.ensure_future(_gone(request.receive))
        try:
            await asyncio.wait((computing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not computing.done():
                raise _GoneAway
            answer = computing.result()
        finally:
            computing.cancel()
            leaving.cancel()
        if self._inputs is None:  # the first request that was answered tells what the model takes
            self._inputs = specs_of(inputs, rows=rows > 0)
        if self._outputs is None:
            in_rows = rows > 0 and all(array.ndim and len(array) == rows for array in answer.outputs.values())
            self._outputs = specs_of(answer.outputs, rows=in_rows)
        return answer

    def _deadline(self, request: Request) -> float:
        given = request.headers.get("paceline-deadline")
        if given is None:
            return self._settings.deadline_s
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MOST_DEADLINE_S:
            raise bad("Paceline-Deadline", given, f"give seconds above 0 and up to {MOST_DEADLINE_S:g}")
        return seconds

    async def _body(self, request: Request) -> bytes:
        most = self._settings.most_body
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > most:
            raise RequestError(TOO_LARGE, f"the body has {declared} bytes: {most} are allowed")
        pieces, size = [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise RequestError(TOO_LARGE, f"the body has more than {most} bytes: that many are allowed")
            pieces.append(piece)
        return _unpacked(b"".join(pieces), request.headers.get("content-encoding", "identity").strip().lower(), most)

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────────

    def _checked(self, request: Request) -> int | None:
        """Returns the version that a request names; None if it names none."""
        name = request.path_params["model"]
        if name != self._settings.name:
            raise RequestError(UNKNOWN, f"model is {name[:100]!r}: this server has {self._settings.name!r}")
        version = request.path_params.get("version")
        if version is None:
            return None
        known = sorted({*self._pool.queue.versions, *([self._pool.version] if self._pool.version else [])})
        if version not in map(str, known):
            raise RequestError(
                UNKNOWN, f"version is {version[:20]!r}: this server has {', '.join(map(str, known)) or 'none loaded'}"
            )
        return int(version)

    async def _metadata(self, request: Request) -> Response:
        self._checked(request)
        versions = [str(self._pool.version)] if self._pool.version is not None else []
        return _json(metadata(self._settings.name, versions, self._inputs or [], self._outputs or []))

    async def _config(self, request: Request) -> Response:
        self._checked(request)
        most = self._pool.queue.most_rows
        return _json(config(self._settings.name, most, self._inputs or [], self._outputs or []))

    async def _model_ready(self, request: Request) -> Response:
        self._checked(request)
        return self._readiness()

    async def _index(self, request: Request) -> Response:
        body = await self._body(request)
        only_ready = bool(decode_json(body, dict[str, Any]).get("ready")) if body else False
        state = "READY" if self._pool.is_ready else "UNAVAILABLE"
        version = str(self._pool.version) if self._pool.version is not None else ""
        listed = [{"name": self._settings.name, "version": version, "state": state, "reason": ""}]
        return _json(listed if state == "READY" or not only_ready else [])

    async def _load(self, request: Request) -> Response:
        self._checked(request)
        body = await self._body(request)
        if body and decode_json(body, dict[str, Any]).get("parameters"):
            raise bad("parameters", "given", "a load takes what the checkpoint is now, leave them out")
        try:
            version = await self._pool.load()
        except PacelineError as error:
            raise RequestError(BAD, f"the checkpoint was not loaded, and all is as it was: {error}") from error
        return _json({"name": self._settings.name, "version": str(version)})

    async def _unload(self, request: Request) -> Response:
        self._checked(request)
        body = await self._body(request)
        if body:
            decode_json(body, dict[str, Any])
        await self._pool.unload()
        return _json({"name": self._settings.name})

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────

    async def _server(self, _: Request) -> Response:
        return _json({"name": "paceline", "version": version_of("paceline"), "extensions": _EXTENSIONS})

    async def _live(self, _: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, _: Request) -> Response:
        return self._readiness()

    def _readiness(self) -> Response:
        ready = self._pool.is_ready
        return _json({"ready": ready}, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        return Response(self._pool.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _openapi(self, _: Request) -> Response:
        return _json(openapi(self._settings.name, version_of("paceline"), self._known(self._inputs)))

    async def _docs(self, _: Request) -> Response:
        return HTMLResponse(
            openapi_page(openapi(self._settings.name, version_of("paceline"), self._known(self._inputs)))
        )

    async def _page(self, _: Request) -> Response:
        page = files("paceline.serve").joinpath("page.html").read_text()
        told = {
            "name": self._settings.name,
            "kind": self._description.kind,
            "inputs": self._known(self._inputs),
            "example": self._description.example if self._settings.token is None else None,
            "token": self._settings.token is not None,
        }
        safe = msgspec.json.encode(told).decode().replace("<", "\\u003c")
        return HTMLResponse(page.replace("/*MODEL*/null", safe))

    @staticmethod
    def _known(specs: list[ServedTensor] | None) -> list[ServedTensor]:
        return specs or []


class _GoneAway(Exception):
    """The client has closed its connection."""


async def _gone(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _unpacked(body: bytes, encoding: str, most: int) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise bad("Content-Encoding", encoding[:40], "give gzip, deflate or none")
    unpacking = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        plain = unpacking.decompress(body, most + 1)
    except zlib.error as error:
        raise RequestError(BAD, f"the body is not {encoding}: {error}") from None
    if len(plain) > most:
        raise RequestError(TOO_LARGE, f"the body has more than {most} bytes: that many are allowed")
    if not unpacking.eof:
        raise RequestError(BAD, f"the body is not {encoding}: it is cut short")
    return plain


def _header_length(request: Request) -> int | None:
    given = request.headers.get("inference-header-content-length")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise bad("Inference-Header-Content-Length", given[:40], "give a whole number of bytes")
    return int(given)


def _about(answer: ServedAnswer) -> dict[str, str]:
    return {
        "Paceline-Version": str(answer.version),
        "Paceline-Process": answer.process,
        "Paceline-Together": str(answer.requests),
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def _failed(status: int, sentence: str, retry_after_s: float | None = None) -> Response:
    response = _json({"error": sentence}, status)
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(min(retry_after_s, 3600.0))))
    if status == UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == UNKNOWN:
        return _failed(UNKNOWN, f"there is nothing at {request.url.path[:100]}: GET /docs shows what there is")
    if error.status_code == 405:
        response = _failed(
            405, f"{request.url.path[:100]} does not take {request.method}: GET /docs shows what it takes"
        )
        response.headers.update(error.headers or {})
        return response
    return _failed(error.status_code, str(error.detail))
