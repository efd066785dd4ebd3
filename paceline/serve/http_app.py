"""The server's HTTP: which address answers what. What a request means is the protocols' files', and who computes it
`model_pool`'s.

Every error is JSON with one sentence, `{"error": …}`, also where no route fits. A request is read up to a bound, must
be allowed in if there is a token, has a deadline, and is given up when its client has gone away. One that could not be
answered in time whatever is in it is refused on its headers (`refused`), before anything of its body was read.

What is asked all the time, a row or a few, does not go through routes, tasks and ASGI: its connection
(`quick_protocol`) has it begun here (`begin`), and its answer written (`finish`).
"""

from __future__ import annotations

import hmac
import math
import time
from asyncio import Future
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as version_of
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.serve.access_log import AccessLog
from paceline.serve.for_people import PredictRequest, is_image, is_json, read_predict, write_predict
from paceline.serve.http_request import GoneAway, HttpRequest, WhileThere
from paceline.serve.image_reader import ImageReader
from paceline.serve.model_pool import busy
from paceline.serve.open_inference import (
    InferRequest,
    check_sizes,
    common_rows,
    config,
    decode_json,
    metadata,
    read_infer,
    specs_of,
    write_answer,
)
from paceline.serve.openapi import openapi, openapi_page
from paceline.serve.request_error import BAD, FORBIDDEN, NOT_COMPUTED, UNAUTHORIZED, UNKNOWN, RequestError, bad
from paceline.serve.served_model import Arrays, ServedAnswer, ServedModel
from paceline.serve.served_tensor import ModelDescription, ServedTensor

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
    only_local: bool = False  # only this machine gets here


@dataclass(frozen=True)
class BegunRequest:
    """What was asked, and what will have the answer."""

    asked: InferRequest | PredictRequest
    future: Future[ServedAnswer]


_Endpoint = Callable[[HttpRequest], Awaitable[Response]]
_Reader = Callable[[HttpRequest, bytes], InferRequest | PredictRequest]
_Writer = Callable[[Any, ServedAnswer], Response]


class HttpApp:
    """An ASGI application for one model."""

    def __init__(
        self, settings: HttpSettings, model: ServedModel, description: ModelDescription, log: AccessLog
    ) -> None:
        self._settings, self._model, self._description, self._log = settings, model, description, log
        self._inputs, self._outputs = description.inputs, description.outputs
        self._reader = ImageReader()
        self._asking: dict[str, tuple[_Reader, _Writer]] = {
            "/predict": (self._read_predict, self._write_predict),
            f"/v2/models/{settings.name}/infer": (self._read_infer, self._write_infer),
        }
        routes: list[tuple[str, str, _Endpoint]] = [("POST", "/predict", self._predict)]
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
            routes=[
                Route(path, _routed(self._handled(endpoint)), methods=[method]) for method, path, endpoint in routes
            ],
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
            self.note(scope, status, time.perf_counter() - began, size)

    def close(self) -> None:
        """Reads no more images."""
        self._reader.close()

    # ── in short ─────────────────────────────────────────────────────────────────────────────────────────────

    def is_asking(self, request: HttpRequest) -> bool:
        """Returns whether it asks the model, so that it may be `refused`."""
        return request.scope["method"] == "POST" and request.path in self._asking

    def is_short(self, request: HttpRequest) -> bool:
        """Returns whether `begin` and `finish` are for it. Not for what may be an image: to read one takes long."""
        return request.path != "/predict" or is_json(request.content_type)

    def refused(self, request: HttpRequest) -> Response | None:
        """Returns what a request is told that could not be answered in time, by its headers alone; None: it might."""
        try:
            self._let_in(request)
            refusal = self._model.refusal(request.deadline_s(self._settings.deadline_s))
        except RequestError:
            return None  # it is told so in its turn
        if refusal is None:
            return None
        response = _failed(busy(refusal))
        self.note(request.scope, response.status_code, 0.0, len(response.body))
        return response

    def begin(self, request: HttpRequest, body: bytes) -> Response | BegunRequest:
        """Has a request answered, all of which is there; whoever cancels the future has gone away."""
        read, _ = self._asking[request.path]
        try:
            self._let_in(request)
            asked = read(request, request.unpacked(body, self._settings.most_body))
            return BegunRequest(asked, self._ask(request, asked.inputs, None))
        except RequestError as error:
            return self._sorry(error)

    def finish(self, request: HttpRequest, begun: BegunRequest) -> Response:
        """Returns the answer to a request that was begun, whose future is done."""
        _, write = self._asking[request.path]
        error = begun.future.exception()  # raised, it would hold this frame, which holds the future, which holds it
        if isinstance(error, RequestError):
            return self._sorry(error)
        try:
            answer = begun.future.result()
            self._learn(begun.asked.inputs, answer)
            return write(begun.asked, answer)
        except RequestError as wrong:
            return self._sorry(wrong)

    def note(self, scope: Scope, status: int, seconds: float, size: int) -> None:
        """Counts, times and logs a request; status 0 is one whose client went away."""
        self._model.metrics.count_request(status)
        self._model.metrics.request_seconds.observe(seconds)
        self._log.write(scope, status, seconds, size)

    def _handled(self, endpoint: _Endpoint) -> _Endpoint:
        async def handle(request: HttpRequest) -> Response:
            try:
                self._let_in(request)
                return await endpoint(request)
            except RequestError as error:
                return self._sorry(error)
            except GoneAway:
                return Response(status_code=499)

        return handle

    def _let_in(self, request: HttpRequest) -> None:
        token = self._settings.token
        if token is None and request.scope["method"] == "POST":
            # a browser has every page it shows ask what is on this machine, and without a token nothing else tells
            origin = request.foreign_origin(only_local=self._settings.only_local)
            if origin is not None:
                sentence = f"Origin is {origin[:100]!r}: without --token-file only this server's own page may ask"
                raise RequestError(FORBIDDEN, sentence)
        if token is None or request.path in OPEN_TO_ALL:
            return
        if not hmac.compare_digest(request.authorization, f"Bearer {token}".encode()):
            raise RequestError(UNAUTHORIZED, "this server wants a token: send Authorization: Bearer TOKEN")

    # ── answering ────────────────────────────────────────────────────────────────────────────────────────────

    async def _infer(self, request: HttpRequest) -> Response:
        version = self._checked(request)
        asked = self._read_infer(request, await self._body(request))
        return self._write_infer(asked, await self._computed(request, asked.inputs, version))

    async def _predict(self, request: HttpRequest) -> Response:
        body = await self._body(request)
        began = time.perf_counter()  # that its client has sent slowly is not this server's time
        if is_image(body, request.content_type):
            with WhileThere(request.receive):
                asked = await self._reader.read(partial(self._read_predict, request, body))
        else:
            asked = self._read_predict(request, body)
        waited_s = time.perf_counter() - began
        return self._write_predict(asked, await self._computed(request, asked.inputs, None, waited_s))

    def _read_infer(self, request: HttpRequest, body: bytes) -> InferRequest:
        return read_infer(body, request.json_length, self._inputs)

    def _read_predict(self, request: HttpRequest, body: bytes) -> PredictRequest:
        return read_predict(body, request.content_type, self._inputs)

    def _write_infer(self, asked: InferRequest, answer: ServedAnswer) -> Response:
        data, length = write_answer(self._settings.name, answer, asked)
        headers = _about(answer)
        if length is not None:
            headers["Inference-Header-Content-Length"] = str(length)
        return Response(data, headers=headers, media_type=_JSON if length is None else "application/octet-stream")

    def _write_predict(self, asked: PredictRequest, answer: ServedAnswer) -> Response:
        return Response(write_predict(self._settings.name, answer, asked), headers=_about(answer), media_type=_JSON)

    async def _computed(
        self, request: HttpRequest, inputs: Arrays, version: int | None, waited_s: float = 0.0
    ) -> ServedAnswer:
        with WhileThere(request.receive):
            answer = await self._ask(request, inputs, version, waited_s)
        self._learn(inputs, answer)
        return answer

    def _ask(
        self, request: HttpRequest, inputs: Arrays, version: int | None, waited_s: float = 0.0
    ) -> Future[ServedAnswer]:
        if self._description.declared:
            check_sizes(inputs, self._inputs or [])
        deadline_s = max(0.0, request.deadline_s(self._settings.deadline_s) - waited_s)
        return self._model.ask(inputs, self._rows(inputs), deadline_s, version)

    def _rows(self, inputs: Arrays) -> int:
        return common_rows(inputs) if self._description.in_rows else 0

    def _learn(self, inputs: Arrays, answer: ServedAnswer) -> None:
        """Counts an answer; the first one tells what the model takes and gives, where nobody could."""
        self._model.metrics.answers.inc()
        if self._inputs is None:
            self._inputs = specs_of(inputs, rows=self._rows(inputs) > 0)
        if self._outputs is None:
            rows = self._rows(inputs)
            in_rows = rows > 0 and all(array.ndim and len(array) == rows for array in answer.outputs.values())
            self._outputs = specs_of(answer.outputs, rows=in_rows)

    def _sorry(self, error: RequestError) -> Response:
        """Returns why there is no answer; of what a model could not compute, with what it takes."""
        if error.status == NOT_COMPUTED and self._inputs:
            takes = ", ".join(spec.words for spec in self._inputs)
            error = RequestError(NOT_COMPUTED, f"{error} (the model takes {takes})")
        return _failed(error)

    async def _body(self, request: HttpRequest) -> bytes:
        return await request.body(self._settings.most_body)

    # ── the model ────────────────────────────────────────────────────────────────────────────────────────────

    def _checked(self, request: HttpRequest) -> int | None:
        """Returns the version that a request names; None if it names none."""
        name = request.parts["model"]
        if name != self._settings.name:
            raise RequestError(UNKNOWN, f"model is {name[:100]!r}: this server has {self._settings.name!r}")
        version = request.parts.get("version")
        if version is None:
            return None
        known = self._model.versions
        if version not in map(str, known):
            raise RequestError(
                UNKNOWN, f"version is {version[:20]!r}: this server has {', '.join(map(str, known)) or 'none loaded'}"
            )
        return int(version)

    async def _metadata(self, request: HttpRequest) -> Response:
        self._checked(request)
        versions = [str(self._model.version)] if self._model.version is not None else []
        return _json(metadata(self._settings.name, versions, self._inputs or [], self._outputs or []))

    async def _config(self, request: HttpRequest) -> Response:
        self._checked(request)
        most = self._model.most_rows
        return _json(config(self._settings.name, most, self._inputs or [], self._outputs or []))

    async def _model_ready(self, request: HttpRequest) -> Response:
        self._checked(request)
        return self._readiness()

    async def _index(self, request: HttpRequest) -> Response:
        body = await self._body(request)
        only_ready = bool(decode_json(body, dict[str, Any]).get("ready")) if body else False
        state = "READY" if self._model.is_ready else "UNAVAILABLE"
        version = str(self._model.version) if self._model.version is not None else ""
        reason = self._model.problem
        listed = [{"name": self._settings.name, "version": version, "state": state, "reason": reason}]
        return _json(listed if state == "READY" or not only_ready else [])

    async def _load(self, request: HttpRequest) -> Response:
        self._checked(request)
        body = await self._body(request)
        if body and decode_json(body, dict[str, Any]).get("parameters"):
            raise bad("parameters", "given", "a load takes what the checkpoint is now, leave them out")
        try:
            version = await self._model.load()
        except PacelineError as error:
            raise RequestError(BAD, f"the checkpoint was not loaded, and all is as it was: {error}") from error
        return _json({"name": self._settings.name, "version": str(version)})

    async def _unload(self, request: HttpRequest) -> Response:
        self._checked(request)
        body = await self._body(request)
        if body:
            decode_json(body, dict[str, Any])
        await self._model.unload()
        return _json({"name": self._settings.name})

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────

    async def _server(self, _: HttpRequest) -> Response:
        return _json({"name": "paceline", "version": version_of("paceline"), "extensions": _EXTENSIONS})

    async def _live(self, _: HttpRequest) -> Response:
        return _json({"live": True})

    async def _ready(self, _: HttpRequest) -> Response:
        return self._readiness()

    def _readiness(self) -> Response:
        ready = self._model.is_ready
        return _json({"ready": ready}, 200 if ready else 503)

    async def _metrics(self, _: HttpRequest) -> Response:
        return Response(self._model.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _openapi(self, _: HttpRequest) -> Response:
        return _json(openapi(self._settings.name, version_of("paceline"), self._known(self._inputs)))

    async def _docs(self, _: HttpRequest) -> Response:
        return HTMLResponse(
            openapi_page(openapi(self._settings.name, version_of("paceline"), self._known(self._inputs)))
        )

    async def _page(self, _: HttpRequest) -> Response:
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


def _routed(endpoint: _Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Returns it as Starlette's routes want it."""

    async def handle(request: Request) -> Response:
        return await endpoint(HttpRequest(request.scope, request.receive))

    return handle


def _about(answer: ServedAnswer) -> dict[str, str]:
    about = {
        "Paceline-Version": str(answer.version),
        "Paceline-Process": answer.process,
        "Paceline-Together": str(answer.requests),
    }
    if answer.step is not None:
        about["Paceline-Step"] = str(answer.step)
    if answer.members:
        about["Paceline-Members"] = ",".join(answer.members)
        about["Paceline-Missing"] = ",".join(answer.missing)
    return about


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def _failed(error: RequestError) -> Response:
    response = _json({"error": str(error)}, error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(min(error.retry_after_s, 3600.0))))
    if error.status == UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == UNKNOWN:
        sentence = f"there is nothing at {request.url.path[:100]}: GET /docs shows what there is"
        return _failed(RequestError(UNKNOWN, sentence))
    if error.status_code == 405:
        sentence = f"{request.url.path[:100]} does not take {request.method}: GET /docs shows what it takes"
        response = _failed(RequestError(405, sentence))
        response.headers.update(error.headers or {})
        return response
    return _failed(RequestError(error.status_code, str(error.detail)))
