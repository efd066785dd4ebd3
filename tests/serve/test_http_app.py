"""What HTTP makes of requests and answers, without processes: a model that is a function of its inputs."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from paceline.serve import http_app
from paceline.serve.access_log import AccessLog
from paceline.serve.for_people import PredictRequest, read_predict
from paceline.serve.http_app import HttpApp, HttpSettings
from paceline.serve.http_request import HttpRequest
from paceline.serve.image_reader import MOST_WAITING
from paceline.serve.request_error import NOT_COMPUTED, RequestError
from paceline.serve.served_model import ServedAnswer
from paceline.serve.served_tensor import ModelDescription, ServedTensor
from paceline.serve.serving_metrics import ServingMetrics


class Summing:
    """Adds rows up; cannot compute what is longer than four."""

    def __init__(self) -> None:
        self.metrics = ServingMetrics()

    def refusal(self, deadline_s: float) -> None:
        return None

    def ask(self, inputs: Any, rows: int, deadline_s: float, version: int | None) -> asyncio.Future[ServedAnswer]:
        future: asyncio.Future[ServedAnswer] = asyncio.get_running_loop().create_future()
        if inputs["x"].shape[1] > 4:
            future.set_exception(RequestError(NOT_COMPUTED, "the model could not compute this: it is too long"))
        else:
            future.set_result(ServedAnswer({"sum": inputs["x"].sum(1)}, 1, "1.1", 1, 0.0, 0.0))
        return future


def made_app(*, declared: bool, token: str | None = None, local: bool = False) -> HttpApp:
    inputs = [ServedTensor("x", "FP32", [-1, 4])]
    model: Any = Summing()
    description = ModelDescription(kind="Summing", inputs=inputs, declared=declared)
    return HttpApp(HttpSettings("model", 1.0, 1000, token, local), model, description, AccessLog(None))


def told(
    body: Any, *, declared: bool, token: str | None = None, local: bool = False, **headers: str
) -> tuple[int, Any]:
    """The status and the JSON of the answer to a POST of this body to /predict."""
    app = made_app(declared=declared, token=token, local=local)
    headers = {"Content-Type": "application/json", **headers}

    async def ask() -> Response:
        names = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
        request = HttpRequest({"method": "POST", "path": "/predict", "headers": names})
        assert app.is_asking(request)
        assert app.is_short(request)
        begun = app.begin(request, json.dumps(body).encode())
        return begun if isinstance(begun, Response) else app.finish(request, begun)

    response = asyncio.run(ask())
    return response.status_code, json.loads(response.body)


def test_pages_of_others_may_not_ask_where_there_is_no_token() -> None:
    def status(**headers: str) -> int:
        return told([[1, 2, 3, 4]], declared=True, **headers)[0]

    assert status(Host="here:8000", Origin="http://here:8000") == 200
    assert status(Host="here:8000", Origin="https://HERE:8000") == 200  # somebody in front of it speaks https
    assert status(Host="here:8000") == status() == 200
    for origin in ("http://elsewhere.example", "http://here", "http://here:8001", "null", "http://", ""):
        assert status(Host="here:8000", Origin=origin) == status(Origin=origin) == 403
    for own in ("here.example:8000", "127.0.0.1.example", "localhost.example:8000"):  # made to lead to this machine
        assert status(Host=own, Origin=f"http://{own}") == 200
        assert told([[1, 2, 3, 4]], declared=True, local=True, Host=own, Origin=f"http://{own}")[0] == 403
    for own in ("localhost:8000", "LOCALHOST", "model.localhost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]"):
        assert told([[1, 2, 3, 4]], declared=True, local=True, Host=own, Origin=f"http://{own}")[0] == 200
    sentence = "Origin is 'http://other': without --token-file only this server's own page may ask"
    assert told([[1]], declared=True, Host="here", Origin="http://other") == (403, {"error": sentence})
    secret = "0123456789abcdef"
    headers = {"Host": "here", "Origin": "http://other", "Authorization": f"Bearer {secret}"}
    assert told([[1, 2, 3, 4]], declared=True, token=secret, **headers)[0] == 200  # it was told the token


def test_others_are_answered_while_images_are_read_of_which_few_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def slow(body: bytes, content_type: str, specs: list[ServedTensor] | None) -> PredictRequest:
        assert may_end.wait(20), "whoever answers others is reading"
        return read_predict(b"[[1, 2, 3, 4]]", content_type, specs)

    monkeypatch.setattr(http_app, "read_predict", slow)

    async def status(app: HttpApp) -> int:
        heard: list[Any] = []

        async def receive() -> Any:
            if heard_body.is_set():
                await asyncio.sleep(60)  # the client is there
            heard_body.set()
            return {"type": "http.request", "body": b"\x89PNG", "more_body": False}

        async def send(message: Any) -> None:
            heard.append(message)

        heard_body = asyncio.Event()
        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [], "query_string": b""}
        assert app.is_asking(HttpRequest(scope))
        assert not app.is_short(HttpRequest(scope))
        await app(scope, receive, send)
        return int(heard[0]["status"])

    async def ask() -> tuple[list[int], int]:
        app = made_app(declared=True)
        reading = [asyncio.create_task(status(app)) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0.05)
        one_more = await status(app)
        may_end.set()
        found = await asyncio.gather(*reading), one_more
        app.close()
        return found

    assert asyncio.run(ask()) == ([200] * MOST_WAITING, 429)


def test_what_is_said_to_be_json_is_read_as_nothing_else() -> None:
    for body in (b"\x89PNG\r\n", b"\x93NUMPY\x01\x00"):
        with pytest.raises(RequestError, match="JSON"):
            read_predict(body, "application/json; charset=utf-8", [ServedTensor("x", "FP32", [-1, 4])])


def test_an_image_of_a_kind_that_starts_programs_or_nobody_sends_is_not_read() -> None:
    image_module = pytest.importorskip("PIL.Image")
    specs = [ServedTensor("x", "FP32", [-1, 4])]
    for kind, is_read in (("PNG", True), ("BMP", True), ("PPM", False), ("TIFF", False)):
        file = io.BytesIO()
        image_module.new("L", (2, 2), 255).save(file, kind)
        if is_read:
            assert read_predict(file.getvalue(), "image/any", specs).inputs["x"].tolist() == [[1.0] * 4]
        else:
            with pytest.raises(RequestError, match="send PNG, JPEG, GIF, BMP or WebP"):
                read_predict(file.getvalue(), "image/any", specs)


def test_nothing_is_kept_of_a_request_that_failed() -> None:
    app = made_app(declared=False)

    async def ask() -> weakref.ref[Any]:
        request = HttpRequest({"method": "POST", "path": "/predict", "headers": []})
        begun = app.begin(request, json.dumps([[1] * 5]).encode())
        assert not isinstance(begun, Response)
        assert app.finish(request, begun).status_code == 422
        return weakref.ref(begun.future)

    gc.disable()  # it would find it some day
    try:
        assert asyncio.run(ask())() is None
    finally:
        gc.enable()


def test_sizes_that_were_said_hold_and_those_of_an_example_do_not() -> None:
    assert told([[1, 2, 3, 4]], declared=True)[1]["outputs"] == {"sum": [10]}
    assert told([[1, 2, 3]], declared=False)[1]["outputs"] == {"sum": [6]}
    assert told([[1, 2, 3]], declared=True) == (400, {"error": "shape of x is [1, 3]: the model takes x FP32 [-1, 4]"})


def test_what_a_model_cannot_compute_is_told_with_what_it_takes() -> None:
    sentence = "the model could not compute this: it is too long (the model takes x FP32 [-1, 4])"
    assert told(np.ones((1, 5)).tolist(), declared=False) == (422, {"error": sentence})


@pytest.mark.parametrize("given", ["0", "0.0005", "-1", "nan", "1e9", "soon", ""])
def test_a_deadline_nobody_could_mean_is_refused(given: str) -> None:
    status, answer = told([[1, 2, 3, 4]], declared=True, Paceline_Deadline=given)
    assert (status, answer) == (400, {"error": f"Paceline-Deadline is {given!r}: give seconds from 0.001 to 3600"})
