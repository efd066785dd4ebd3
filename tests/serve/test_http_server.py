"""`paceline serve`, asked over HTTP by real clients, with processes that are held, killed and replaced."""

from __future__ import annotations

import gzip
import io
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import LONG_S, Served, outputs, save_weight

HOLDING, FAILING, DYING = [555.0, 0, 0, 0], [666.0, 0, 0, 0], [777.0, 0, 0, 0]
QUEUE = 12


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One process, so that it is known who is busy."""
    served = Served(tmp_path_factory.mktemp("served"), "--queue", str(QUEUE), "--max-body", "100KB")
    yield served
    assert served.end() == 0, served.said
    assert "Traceback" not in served.said


@pytest.fixture
def busy(served: Served) -> Iterator[tuple[Served, ThreadPoolExecutor]]:
    """The one process is at a request that takes as long as the test likes."""
    served.hold()
    before = served.metric("paceline_batch_rows_count")
    with ThreadPoolExecutor(2 * QUEUE) as pool:
        held = pool.submit(served.ask, HOLDING)
        served.wait_for(lambda: served.metric("paceline_batch_rows_count") > before)
        yield served, pool
        if served.hold_file.exists():
            served.release()
        assert held.result(LONG_S).status_code == 200


def waiting(served: Served, count: int) -> None:
    served.wait_for(lambda: served.metric("paceline_queue_depth") == count)


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_clients_of_triton_work_unchanged(served: Served) -> None:
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException

    client = InferenceServerClient(served.told["address"].removeprefix("http://"), network_timeout=LONG_S)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("model")
    assert client.get_server_metadata()["name"] == "paceline"
    told = client.get_model_metadata("model")
    assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert told["outputs"] == [
        {"name": "scaled", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "total", "datatype": "FP32", "shape": [-1]},
    ]
    assert client.get_model_config("model")["max_batch_size"] == 32
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    weight = outputs(served.ask([1.0, 0, 0, 0]))["scaled"][0]
    for binary in (True, False):
        given_x = InferInput("x", [2, 4], "FP32")
        given_x.set_data_from_numpy(x, binary_data=binary)
        wanted = [InferRequestedOutput("total", binary_data=binary)]
        for more in ({}, {"request_compression_algorithm": "gzip"}):
            answer = client.infer("model", [given_x], outputs=wanted, request_id="seven", **more)
            assert answer.as_numpy("total").tolist() == (weight * x.sum(1)).tolist()
            assert answer.as_numpy("scaled") is None
            assert answer.get_response()["id"] == "seven"
    asked = [client.async_infer("model", [given_x]) for _ in range(4)]
    assert [one.get_result().as_numpy("total").tolist() for one in asked] == [(weight * x.sum(1)).tolist()] * 4
    for shape, data, sentence in (
        ([4], x[0], r"shape of x is \[4\]: the model takes x FP32 \[-1, 4\]"),
        ([2, 4], x.astype(np.float64), "datatype of x is 'FP64': the model takes x FP32"),
    ):
        wrong = InferInput("x", shape, "FP64" if data.dtype == np.float64 else "FP32")
        wrong.set_data_from_numpy(data)
        with pytest.raises(InferenceServerException, match=sentence):
            client.infer("model", [wrong])
    with pytest.raises(InferenceServerException, match="a load takes what the checkpoint is now"):
        client.load_model("model", config="{}")
    with pytest.raises(InferenceServerException, match="there is nothing at /v2/models/model/stats"):
        client.get_inference_statistics("model")
    before = int(client.get_model_repository_index()[0]["version"])
    client.load_model("model")
    assert client.get_model_repository_index() == [
        {"name": "model", "version": str(before + 1), "state": "READY", "reason": ""}
    ]
    with pytest.raises(InferenceServerException, match="model is 'other': this server has 'model'"):
        client.get_model_metadata("other")
    with pytest.raises(InferenceServerException, match="version is '99'"):
        client.infer("model", [given_x], model_version="99")
    client.unload_model("model")
    assert not client.is_model_ready("model")
    assert served.ask([1.0, 0, 0, 0]).status_code == 503
    client.load_model("model")
    assert client.is_model_ready("model")
    client.close()


def test_people_send_lists_files_and_images(served: Served, tmp_path: Path) -> None:
    weight = outputs(served.ask([1.0, 0, 0, 0]))["scaled"][0]

    def total(body: Any, **headers: str) -> Any:
        answer = served.client.post("/predict", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["outputs"]["total"]

    assert total(b"[1, 2, 3, 4]") == 10 * weight  # one row, as such
    assert total(b'{"x": [[1, 2, 3, 4], [5, 6, 7, 8]]}') == [10 * weight, 26 * weight]
    for array in (np.ones((3, 4)), np.asfortranarray(np.ones((3, 4), np.float32)), np.ones((3, 4), ">i2")):
        buffer = io.BytesIO()
        np.save(buffer, array)
        assert total(buffer.getvalue()) == [4 * weight] * 3
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (20, 20), 255).save(buffer, "PNG")
    assert total(buffer.getvalue()) == [4 * weight]  # four numbers are two by two pixels, white
    assert total(gzip.compress(b"[1, 1, 1, 1]"), **{"Content-Encoding": "gzip"}) == 4 * weight
    document = served.client.get("/openapi.json").json()
    assert "/v2/models/{model}/infer" in document["paths"]
    for page in ("/", "/docs"):
        text = served.client.get(page).text
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "https://" not in text


def test_the_process_that_speaks_http_has_no_torch(served: Served) -> None:
    assert "libtorch" not in Path(f"/proc/{served.told['process']}/maps").read_text()


# ── under load ───────────────────────────────────────────────────────────────────────────────────────────────


def test_what_waits_is_computed_together_and_a_bad_one_fails_alone(busy: tuple[Served, ThreadPoolExecutor]) -> None:
    served, pool = busy
    asked = [pool.submit(served.ask, [float(number), 1, 1, 1]) for number in range(1, 9)]
    waiting(served, 8)
    served.release()
    answers = [one.result(LONG_S) for one in asked]
    assert [answer.headers["Paceline-Together"] for answer in answers] == ["8"] * 8
    weight = outputs(served.ask([1.0, 0, 0, 0]))["scaled"][0]
    assert [outputs(answer)["total"] for answer in answers] == [[weight * (n + 3)] for n in range(1, 9)]


def test_a_bad_request_in_a_batch_fails_alone(busy: tuple[Served, ThreadPoolExecutor]) -> None:
    served, pool = busy
    asked = [pool.submit(served.ask, row) for row in ([1.0, 0, 0, 0], FAILING, [2.0, 0, 0, 0])]
    waiting(served, 3)
    served.release()
    codes = [one.result(LONG_S).status_code for one in asked]
    assert codes == [200, 422, 200]
    assert "ValueError: no 666 here" in asked[1].result().json()["error"]


def test_a_full_queue_and_a_deadline_that_cannot_be_met_are_refused_at_once(
    busy: tuple[Served, ThreadPoolExecutor],
) -> None:
    served, pool = busy
    late = served.ask([1.0, 0, 0, 0], deadline_s=0.02)
    assert late.status_code == 429
    asked = [pool.submit(served.ask, [1.0, 0, 0, 0]) for _ in range(QUEUE)]
    waiting(served, QUEUE)
    refused = served.ask([1.0, 0, 0, 0])
    assert (refused.status_code, refused.json()["error"]) == (
        429,
        f"the server is busy: {QUEUE} requests are waiting, and there is no room for more",
    )
    assert int(refused.headers["Retry-After"]) >= 1
    served.release()
    assert {one.result(LONG_S).status_code for one in asked} == {200}


def test_what_is_refused_is_refused_before_its_body_and_the_connection_goes_on(
    busy: tuple[Served, ThreadPoolExecutor],
) -> None:
    served, pool = busy
    asked = [pool.submit(served.ask, [1.0, 0, 0, 0]) for _ in range(QUEUE)]
    waiting(served, QUEUE)
    body = b"[1, 2, 3, 4]"

    def answer(connection: socket.socket) -> tuple[bytes, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(65536)
        head, _, rest = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(rest) < length:
            rest += connection.recv(65536)
        return head.split(b"\r\n")[0], rest

    with socket.create_connection(("127.0.0.1", served.told["port"]), timeout=LONG_S) as connection:
        head = f"POST /predict HTTP/1.1\r\nHost: here\r\nPaceline-Deadline: 90\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())  # and nothing of the body
        status, sentence = answer(connection)
        assert status == b"HTTP/1.1 429 Too Many Requests"
        assert b"there is no room for more" in sentence
        connection.sendall(body[:5])
        connection.sendall(body[5:] + b"GET /v2/health/live HTTP/1.1\r\nHost: here\r\n\r\n")
        assert answer(connection) == (b"HTTP/1.1 200 OK", b'{"live":true}')
        served.release()
        assert {one.result(LONG_S).status_code for one in asked} == {200}
        connection.sendall(head.encode() + body)
        status, rest = answer(connection)
        assert status == b"HTTP/1.1 200 OK"
        assert json.loads(rest)["outputs"]["total"] > 0


def test_a_request_that_is_computed_too_long_is_told_so_and_the_process_goes_on(served: Served) -> None:
    served.hold()
    answer = served.ask(HOLDING, deadline_s=0.3)
    assert answer.status_code in (429, 504), answer.text  # 429 if a machine under load had not even begun
    served.release()
    assert served.ask([1.0, 0, 0, 0]).status_code == 200


def test_what_a_client_has_left_is_dropped(busy: tuple[Served, ThreadPoolExecutor]) -> None:
    served, _ = busy
    left, computed = served.metric("paceline_left_total"), served.metric("paceline_batch_requests_sum")
    body = json.dumps([1, 2, 3, 4]).encode()
    with socket.create_connection(("127.0.0.1", served.told["port"])) as connection:
        head = f"POST /predict HTTP/1.1\r\nHost: here\r\nPaceline-Deadline: 90\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        waiting(served, 1)
    served.wait_for(lambda: served.metric("paceline_left_total") == left + 1)
    served.release()
    served.ask([1.0, 0, 0, 0])
    assert served.metric("paceline_batch_requests_sum") == computed + 1  # the last one alone


# ── it lives ─────────────────────────────────────────────────────────────────────────────────────────────────


def children(served: Served) -> list[psutil.Process]:
    """The processes of the model: those below the template."""
    (template,) = psutil.Process(served.told["process"]).children()
    return [process for process in template.children() if process.is_running()]


def test_a_killed_process_is_replaced_and_its_requests_are_answered(
    busy: tuple[Served, ThreadPoolExecutor],
) -> None:
    served, pool = busy
    asked = [pool.submit(served.ask, [float(number), 0, 0, 0]) for number in range(4)]
    waiting(served, 4)
    (before,) = children(served)
    before.kill()
    served.release()
    assert {one.result(LONG_S).status_code for one in asked} == {200}
    (after,) = children(served)
    assert after.pid != before.pid


def test_a_request_that_kills_is_given_up_and_the_server_lives(served: Served) -> None:
    deaths = served.metric("paceline_process_deaths_total")
    answer = served.ask(DYING)
    assert (answer.status_code, answer.json()["error"]) == (
        503,
        "the process that computed this died, and so did the next",
    )
    assert served.metric("paceline_process_deaths_total") == deaths + 2
    assert served.ask([1.0, 0, 0, 0]).status_code == 200


def test_the_template_may_be_killed_too(served: Served) -> None:
    (template,) = psutil.Process(served.told["process"]).children()
    template.kill()
    assert served.ask([1.0, 0, 0, 0]).status_code == 200  # processes do not need it
    assert served.client.post("/v2/repository/models/model/load").status_code == 200
    assert served.ask([1.0, 0, 0, 0]).status_code == 200


def test_every_answer_is_of_one_version_while_versions_come_by_file_signal_and_request(served: Served) -> None:
    first = int(served.client.get("/v2/models/model").json()["versions"][0])
    ended: list[bool] = []

    def ask_on(number: int) -> list[tuple[int, float]]:
        seen = []
        while not ended:
            answer = served.ask([1.0, 1, 1, 1], [2.0, 1, 1, 1])
            total = outputs(answer)["total"]
            assert total[1] * 4 == total[0] * 5
            seen.append((int(answer.json()["model_version"]), total[0] / 4))
        return seen

    def version() -> int:
        return int(served.client.get("/v2/models/model").json()["versions"][0])

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on, number) for number in range(4)]
        try:
            for count in range(1, 7):
                before = version()
                save_weight(served.checkpoint, float(first + count))
                if count % 3 == 0:
                    served.process.send_signal(signal.SIGHUP)
                served.wait_for(lambda before=before: version() > before)  # type: ignore[misc]
            broken = served.checkpoint.read_bytes()
            served.checkpoint.write_bytes(broken[:20])
            refused = served.client.post("/v2/repository/models/model/load")
            assert refused.status_code == 400
            assert "cut short" in refused.json()["error"]
            assert "/proc/self" not in refused.json()["error"]
        finally:
            ended.append(True)
        seen = [pair for one in asking for pair in one.result(LONG_S)]
    weights: dict[int, set[float]] = {}
    for number, weight in seen:
        weights.setdefault(number, set()).add(weight)
    assert all(len(found) == 1 for found in weights.values()), weights
    assert max(found for one in weights.values() for found in one) == first + 6
    save_weight(served.checkpoint, 1.0)
    assert served.client.post("/v2/repository/models/model/load").status_code == 200
    served.wait_for(lambda: len(children(served)) == 1)  # those of the versions before have ended


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────

TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"", 400, "the body is not what it should be"),
        (b"{", 400, "the body is not what it should be"),
        (b'{"inputs": 5}', 400, "$.inputs"),
        (b"[" * 100_000, 413, "99000"),
        ({"inputs": []}, 400, "give the tensors that the model takes"),
        ({"inputs": [TENSOR, TENSOR]}, 400, "it is there twice"),
        ({"inputs": [{**TENSOR, "name": "y"}]}, 400, "inputs is 'y': the model takes x FP32 [-1, 4]"),
        ({"inputs": [{**TENSOR, "datatype": "FP64"}]}, 400, "datatype of x is 'FP64': the model takes x FP32"),
        ({"inputs": [{**TENSOR, "datatype": "BYTES"}]}, 400, "datatype of x is 'BYTES': give one of BOOL"),
        ({"inputs": [{**TENSOR, "shape": [4]}]}, 400, "shape of x is [4]: the model takes"),
        ({"inputs": [{**TENSOR, "shape": [2, 4]}]}, 400, "data of x is '4 numbers': its shape [2, 4] says otherwise"),
        ({"inputs": [{**TENSOR, "shape": [-1, 4]}]}, 400, "shape of x is [-1, 4]"),
        ({"inputs": [{**TENSOR, "shape": [0, 1 << 40, 1 << 40], "data": []}]}, 400, "not above 2**40 in all"),
        ({"inputs": [{**TENSOR, "data": [1, 2, "3", 4]}]}, 400, "data of x is"),
        ({"inputs": [{**TENSOR, "data": [[1, 2], [3]]}]}, 400, "data of x is not a tensor"),
        ({"inputs": [{**TENSOR, "data": [1, 2, 3, 1e300]}]}, 400, "input x at [0, 3] is inf: give finite numbers"),
        (b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [NaN]}]}', 400, "the body is not"),
        ({"inputs": [{**TENSOR, "shape": [1, 3], "data": [1, 2, 3]}]}, 200, ""),
        ({"inputs": [TENSOR], "outputs": [{"name": "no"}]}, 400, "outputs is 'no': the model gives scaled, total"),
        ({"inputs": [{**TENSOR, "parameters": {"binary_data_size": 16}}]}, 400, "not both"),
        ({"inputs": [{**TENSOR, "data": None, "parameters": {"binary_data_size": -4}}]}, 400, "binary_data_size of x"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(served: Served, body: Any, status: int, sentence: str) -> None:
    if body == b"[" * 100_000:
        body, sentence = b"[" * 200_000, "the body has 200000 bytes: 100000 are allowed"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = served.client.post("/v2/models/model/infer", content=content)
    assert (answer.status_code, sentence in answer.text) == (status, True), answer.text
    assert status == 200 or list(answer.json()) == ["error"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/nowhere", {}, 404),
        ("GET", "/predict", {}, 405),
        ("POST", "/v2/models/other/infer", {}, 404),
        ("POST", "/v2/models/model/versions/x/infer", {}, 404),
        ("POST", "/predict", {"Paceline-Deadline": "soon"}, 400),
        ("POST", "/predict", {"Paceline-Deadline": "nan"}, 400),
        ("POST", "/predict", {"Origin": "http://elsewhere.example"}, 403),
        ("POST", "/v2/repository/models/model/unload", {"Origin": "null"}, 403),
        ("POST", "/predict", {"Content-Encoding": "br"}, 400),
        ("POST", "/predict", {"Content-Encoding": "gzip"}, 400),
        ("POST", "/v2/models/model/infer", {"Inference-Header-Content-Length": "-1"}, 400),
        ("POST", "/v2/models/model/infer", {"Inference-Header-Content-Length": "9999"}, 400),
    ],
)
def test_what_is_wrong_with_a_request_is_said(
    served: Served, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    content = b"[1, 2, 3, 4]" if method == "POST" else None
    answer = served.client.request(method, path, content=content, headers=headers)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])


def test_the_page_of_this_server_may_ask_it(served: Served) -> None:
    answer = served.client.post("/predict", json=[1, 2, 3, 4], headers={"Origin": served.told["address"]})
    assert answer.status_code == 200, answer.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "inputs", "data"]), inner),
    max_leaves=8,
)
harmless = st.lists(st.floats(-100, 100) | json_values, max_size=6)
infer_bodies = st.fixed_dictionaries(
    {
        "inputs": st.lists(
            st.fixed_dictionaries(
                {
                    "name": st.sampled_from(["x", "y"]) | json_values,
                    "shape": st.just([1, 4]) | st.lists(st.integers(-2, 5), max_size=3) | json_values,
                    "datatype": st.sampled_from(["FP32", "INT64", "BOOL", "FP16", "BYTES"]) | json_values,
                    "data": harmless | json_values,
                },
                optional={"parameters": json_values | st.fixed_dictionaries({"binary_data_size": st.integers(-5, 20)})},
            ),
            max_size=2,
        )
    },
    optional={"outputs": json_values, "parameters": json_values, "id": json_values},
)


@given(
    st.one_of(
        infer_bodies.map(lambda body: json.dumps(body).encode(errors="replace")),
        json_values.map(lambda body: json.dumps(body).encode(errors="replace")),
        st.binary(max_size=60),
        st.binary(max_size=40).map(lambda tail: b"\x93NUMPY\x01\x00" + tail),
        st.binary(max_size=40).map(lambda tail: b"\x89PNG\r\n\x1a\n" + tail),
    ),
    st.sampled_from(["/predict", "/v2/models/model/infer", "/v2/repository/index"]),
    st.none() | st.integers(0, 200),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_is_an_error_of_the_server(served: Served, body: bytes, path: str, length: int | None) -> None:
    if any(number in body for number in (b"555", b"666", b"777")):
        return
    headers = {"Inference-Header-Content-Length": str(length)} if length is not None else {}
    answer = served.client.post(path, content=body, headers=headers)
    assert answer.status_code < 500, (body, answer.text)
    assert answer.status_code == 200 or "error" in answer.json()


def test_processes_have_not_grown_by_what_was_asked(served: Served) -> None:
    """Descriptors, above all: every process that was replaced had some."""
    assert psutil.Process(served.told["process"]).num_fds() < 60
    assert psutil.Process(served.told["process"]).memory_info().rss < 300 << 20
