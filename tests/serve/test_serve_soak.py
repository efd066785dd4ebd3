"""Serving for longer: kills and new versions under load, mutated bodies by the million, other people's fuzzer.

How much of each is in the environment: SERVE_SOAK_RELOADS, SERVE_SOAK_KILLS, SERVE_SOAK_BODIES, SERVE_SOAK_EXAMPLES.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from serving import Served, save_weight

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]


def _count(name: str, default: int) -> int:
    return int(os.environ.get(f"SERVE_SOAK_{name}", default))


RELOADS, KILLS = _count("RELOADS", 1000), _count("KILLS", 50)
OBEYED = [word for one in (555.0, 666.0, 777.0) for word in (str(int(one)).encode(), struct.pack("<f", one))]
BODIES, EXAMPLES = _count("BODIES", 1_000_000), _count("EXAMPLES", 100)


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
                left = RELOADS + 2 - count
                if kills < KILLS and chance.random() < 2 * (KILLS - kills) / left:
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
    seed = time.time_ns()
    chance = random.Random(seed)
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    good = json.dumps({"inputs": [tensor], "outputs": [{"name": "total"}], "id": "a"}).encode()
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    row, picture = io.BytesIO(), io.BytesIO()
    np.save(row, np.ones((1, 4), np.float32))
    Image.new("L", (3, 3), 255).save(picture, "PNG")
    for_people = (b"[[1, 2, 3, 4]]", b'{"x": [1, 2, 3, 4]}', row.getvalue(), picture.getvalue())
    pieces = (b"-", b"9" * 30, b"1e999", b"null", b"[", b"{}", b'"', b"\xff", b"NaN", b",", b"\0\0\0\0")

    def mutated(whole: bytes) -> bytes:
        body = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(body) + 1)
            kind = chance.randrange(4)
            if kind == 0 and at < len(body):
                body[at] = chance.randrange(256)
            elif kind == 1:
                del body[at : at + chance.randint(1, 8)]
            elif kind == 2:
                body[at:at] = chance.choice(pieces)
            else:
                body[at:at] = body[: chance.randrange(20)]
        return bytes(body)

    statuses: Counter[int] = Counter()
    process = psutil.Process(served.told["process"])
    memory = 0
    with contextlib.closing(HTTPConnection("127.0.0.1", served.told["port"], timeout=60)) as connection:
        for count in range(BODIES):
            if count == BODIES // 10:  # what it needs for all kinds of bodies is there now
                memory = process.memory_info().rss
            path, whole, headers = chance.choice(
                (
                    ("/v2/models/model/infer", good, {}),
                    ("/v2/models/model/infer", head + bytes(16), {"Inference-Header-Content-Length": str(len(head))}),
                    ("/predict", chance.choice(for_people), {}),
                )
            )
            body = mutated(whole)
            if any(asked in body for asked in OBEYED):
                continue
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
            statuses[answer.status] += 1
            assert answer.status < 500, (seed, body, text)
    assert {200, 400} <= set(statuses) <= {200, 400, 413, 422}, statuses
    assert process.memory_info().rss < memory + (8 << 20)
    assert served.metric("paceline_process_deaths_total") == 0
    assert served.ask([1.0, 0, 0, 0]).status_code == 200


def test_a_fuzzer_that_reads_the_openapi_document_finds_no_error_of_the_server(served: Served, tmp_path: Path) -> None:
    """schemathesis, in an environment of its own. It may load, but not unload: then 503 would be right."""
    home = tmp_path / "fuzzer"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    subprocess.run([home / "bin" / "pip", "install", "--quiet", "schemathesis"], check=True)
    command = [home / "bin" / "schemathesis", "run", "--checks", "not_a_server_error"]
    command += ["--max-examples", str(EXAMPLES), "--exclude-path-regex", "unload"]
    address = served.told["address"]
    found = subprocess.run([*command, f"{address}/openapi.json"], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
    assert re.search(r"\d+ (?:generated|passed)", found.stdout), found.stdout[-2000:]
    assert served.ask([1.0, 0, 0, 0]).status_code == 200
    assert "Traceback" not in served.said


def test_a_training_is_followed_through_deaths_of_its_servers(tmp_path: Path) -> None:
    """Real processes: a server that keeps a log, a run that joins it, and `paceline serve`, which always answers."""
    script = Path(__file__).parent / "member_script.py"
    environment = {**os.environ, "HOLD_FILE": str(tmp_path / "hold"), "OMP_NUM_THREADS": "1"}
    paceline = [sys.executable, "-m", "paceline"]
    folder, address = tmp_path / "kept", "127.0.0.1:17070"

    def start_server() -> subprocess.Popen[bytes]:
        flags = ["--listen", address, "--dir", str(folder)]
        return subprocess.Popen([*paceline, "server", *flags], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    server = start_server()
    run = None
    try:
        while not (folder / "token").exists():
            time.sleep(0.1)
        flags = ["--join", address, "--token", str(folder), "--container", "steady", "--durability", "log"]
        run = subprocess.Popen(
            [*paceline, "run", str(script), *flags],
            cwd=tmp_path,
            env=environment,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        follow = ["--follow", f"{address}:steady", "--follow-token", str(folder), "--follow-every", "200ms"]
        end = time.monotonic() + 120
        while True:
            try:
                served = Served(tmp_path, *follow, "--deadline", "60s", script=script, models=[])
                break
            except AssertionError:  # nobody has filled the container yet
                assert time.monotonic() < end
        with served:
            for _ in range(max(1, KILLS // 10)):
                before = _followed(served)
                served.wait_for(lambda before=before: _followed(served) > before)  # type: ignore[misc]
                server.send_signal(signal.SIGKILL)
                server.wait()
                lost = _followed(served)
                served.wait_for(lambda: served.metric("paceline_source_lost") == 1)
                assert _followed(served) >= lost
                server = start_server()
                served.wait_for(lambda: served.metric("paceline_source_lost") == 0)
    finally:
        for process in filter(None, (run, server)):
            process.kill()
            process.wait()


def _followed(served: Served) -> int:
    """The step that answers; its weight must be that step's."""
    answer = served.ask([1.0, 1, 1, 1])
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["outputs"][0]["data"][0] == told["parameters"]["step"] + 1
    return int(told["parameters"]["step"])
