"""`paceline serve --ensemble`: members in processes each; late, dead and new ones under one address."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from serving import LONG_S, Served, save_weight

SCRIPT = Path(__file__).parent / "member_script.py"
ROW = [1.0, 2, 3, 4]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ensemble")
    members = [folder / f"{name}.safetensors" for name in "abc"]
    for number, path in enumerate(members, 1):
        save_weight(path, float(number))
    flags = ["--ensemble", "mean", "--outputs", "values", "--quorum", "2"]
    served = Served(folder, *flags, script=SCRIPT, models=members)
    yield served
    assert served.end() == 0, served.said
    assert "Traceback" not in served.said


def predict(served: Served, *, deadline_s: float = LONG_S, first: float = ROW[0]) -> httpx.Response:
    headers = {"Paceline-Deadline": str(deadline_s)}
    return served.client.post("/predict", json=[[first, *ROW[1:]]], headers=headers)


def weight(answer: httpx.Response) -> float:
    assert answer.status_code == 200, answer.text
    return float(answer.json()["outputs"]["output"][0][1]) / ROW[1]


def all_answer(served: Served) -> None:
    served.wait_for(lambda: not predict(served).json()["missing"])


def test_all_members_answer_as_one_and_are_named_in_both_protocols(served: Served) -> None:
    answer = predict(served)
    assert weight(answer) == pytest.approx(2.0)
    told = answer.json()
    assert (list(told["members"]), told["missing"]) == (["a", "b", "c"], {})
    assert told["answered_by"] == "a/1.1 b/1.1 c/1.1"
    assert len(set(served.told["processes"].values())) == 3
    from tritonclient.http import InferenceServerClient, InferInput

    client = InferenceServerClient(served.told["address"].removeprefix("http://"), network_timeout=LONG_S)
    given = InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(np.ones((2, 4), np.float32))
    found = client.infer("ensemble", [given], headers={"Paceline-Deadline": str(LONG_S)})
    assert found.as_numpy("output").tolist() == [[2.0] * 4] * 2
    assert found.get_response()["parameters"] == {"members": "a,b,c", "missing": ""}
    client.close()


def test_a_member_that_is_late_is_missing_and_is_not_waited_for_again(served: Served) -> None:
    all_answer(served)
    hold = Path(f"{served.hold_file}-2")
    hold.touch()
    try:
        late = predict(served, deadline_s=2.0)
        assert weight(late) == pytest.approx(2.0)  # of 1 and 3
        assert (list(late.json()["members"]), list(late.json()["missing"])) == (["a", "c"], ["b"])
        assert late.headers["Paceline-Missing"] == "b"
        time.sleep(2.5)  # it is at that question for longer now than the next one has
        began = time.monotonic()
        again = predict(served, deadline_s=2.0)
        assert list(again.json()["missing"]) == ["b"]
        assert "its answer would take about" in again.json()["missing"]["b"]
        assert time.monotonic() - began < 2.0
        assert served.metric("paceline_member_missing_total") >= 2
    finally:
        hold.unlink()
    all_answer(served)


def test_fewer_than_the_quorum_are_no_answer(served: Served) -> None:
    all_answer(served)
    holds = [Path(f"{served.hold_file}-{number}") for number in (1, 2)]
    for hold in holds:
        hold.touch()
    try:
        answer = predict(served, deadline_s=1.0)
        assert answer.status_code in (429, 504), answer.text
        assert "the quorum is 2 (a: " in answer.json()["error"]
    finally:
        for hold in holds:
            hold.unlink()
    all_answer(served)


def test_a_member_that_dies_is_missing_once_and_comes_back(served: Served) -> None:
    all_answer(served)
    answer = predict(served, first=703.0)
    assert (weight(answer), list(answer.json()["missing"])) == (1.5, ["c"])
    assert "died" in answer.json()["missing"]["c"]
    all_answer(served)
    (process,) = [process for name, process in served.told["processes"].items() if name.startswith("a ")]
    psutil.Process(process).kill()
    all_answer(served)


def test_a_version_of_the_ensemble_is_one_of_each_member(served: Served) -> None:
    all_answer(served)
    before = predict(served).json()
    save_weight(served.folder / "b.safetensors", 5.0)
    served.wait_for(lambda: predict(served).json()["version"] > before["version"])
    answer = predict(served)
    assert weight(answer) == pytest.approx(3.0)
    assert answer.json()["members"]["b"]["version"] == before["members"]["b"]["version"] + 1
    save_weight(served.folder / "b.safetensors", 2.0)
    served.process.send_signal(signal.SIGHUP)  # all members anew
    served.wait_for(lambda: weight(predict(served)) == 2.0)
    wrong = served.ask(ROW, version="1")
    assert wrong.status_code == 404
    assert "version is '1': this server has" in wrong.json()["error"]
