"""Serving for longer: kills and new versions under load, mutated bodies by the ten thousand."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from serving import Served, save_weight

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

RELOADS, KILLS, BODIES = 300, 50, 100_000


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, "--replicas", "2", "--max-body", "100KB", "--deadline", "60s") as served:
        yield served


def test_no_answer_is_wrong_over_many_reloads_and_kills(served: Served) -> None:
    """The weight of version n is n: each answer shows by which version it was computed."""
    ended: list[bool] = []

    def ask_on(number: int) -> Counter[int]:
        statuses: Counter[int] = Counter()
        while not ended:
            answer = served.ask([1.0 + number, 1, 1, 1])
            statuses[answer.status_code] += 1
            if answer.status_code == 200:
                told = answer.json()
                (total,) = (tensor["data"] for tensor in told["outputs"] if tensor["name"] == "total")
                assert total == [int(told["model_version"]) * (4.0 + number)]
        return statuses

    chance = random.Random(0)
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask_on, number) for number in range(8)]
        kills = 0
        try:
            for count in range(2, RELOADS + 2):
                new = served.folder / "new.safetensors"
                save_weight(new, float(count))
                served.checkpoint.write_bytes(new.read_bytes())
                answer = served.client.post("/v2/repository/models/model/load")
                assert (answer.status_code, answer.json()["version"]) == (200, str(count))
                if kills < KILLS and chance.random() < 0.3:
                    (template,) = psutil.Process(served.told["process"]).children()
                    processes = template.children()
                    with contextlib.suppress(psutil.NoSuchProcess):  # one of the version before, which has ended
                        chance.choice(processes).kill()
                        kills += 1
                served.wait_for(lambda: served.metric("paceline_processes") == 2)
        finally:
            ended.append(True)
        statuses = sum((one.result() for one in asking), Counter[int]())
    assert set(statuses) <= {200, 503}, statuses
    assert statuses[503] <= 8 * kills
    assert kills == KILLS


def test_no_mutated_body_is_an_error_of_the_server(served: Served) -> None:
    chance = random.Random(time.time_ns())
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    good = json.dumps({"inputs": [tensor], "outputs": [{"name": "total"}], "id": "a"}).encode()

    def mutated() -> bytes:
        body = bytearray(chance.choice((good, b"[[1, 2, 3, 4]]", b'{"x": [1, 2, 3, 4]}')))
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(body) + 1)
            kind = chance.randrange(4)
            if kind == 0 and at < len(body):
                body[at] = chance.randrange(256)
            elif kind == 1:
                del body[at : at + chance.randint(1, 8)]
            elif kind == 2:
                body[at:at] = chance.choice(
                    (b"-", b"9" * 30, b"1e999", b"null", b"[", b"{}", b'"', b"\xff", b"NaN", b",")
                )
            else:
                body[at:at] = body[: chance.randrange(20)]
        return bytes(body)

    memory = psutil.Process(served.told["process"]).memory_info().rss
    path = ("/predict", "/v2/models/model/infer")
    with httpx.Client(base_url=served.told["address"], timeout=60) as client:
        for _ in range(BODIES):
            body = mutated()
            if any(number in body for number in (b"555", b"666", b"777")):
                continue
            answer = client.post(chance.choice(path), content=body)
            assert answer.status_code < 500, (body, answer.text)
    assert psutil.Process(served.told["process"]).memory_info().rss < memory + (64 << 20)
