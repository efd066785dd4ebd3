"""`--pad`: requests of several sizes go together, each with zeros behind its numbers, and each gets its own part."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import LONG_S, Served

from paceline.serve.row_batches import divided, put_together, shape_of
from paceline.serve.shared_values import SharedValues

SCRIPT = Path(__file__).parent / "padded_script.py"
LENGTHS = (2, 5, 3, 5)


@pytest.mark.parametrize("pad", [True, False])
def test_requests_of_several_sizes_go_together_only_if_asked(tmp_path: Path, pad: bool) -> None:
    flags = ["--input", "ids:INT64:-1,-1", *(["--pad"] if pad else [])]
    with Served(tmp_path, *flags, script=SCRIPT) as served, ThreadPoolExecutor(8) as pool:

        def ask(row: list[int]) -> dict[str, object]:
            answer = served.client.post("/predict", json=[row], headers={"Paceline-Deadline": str(LONG_S)})
            assert answer.status_code == 200, answer.text
            told: dict[str, object] = answer.json()
            return told

        served.hold()
        held = pool.submit(ask, [555, 1])
        served.wait_for(lambda: served.metric("paceline_batch_rows_count") == 1)
        rows = [list(range(1, length + 1)) for length in LENGTHS]
        asked = []
        for row in rows:
            asked.append(pool.submit(ask, row))
            served.wait_for(lambda: served.metric("paceline_queue_depth") == len(asked))
        served.release()
        held.result(LONG_S)
        answers = [one.result(LONG_S) for one in asked]
        for row, answer in zip(rows, answers, strict=True):
            outputs = answer["outputs"]
            assert isinstance(outputs, dict)
            assert outputs["doubled"] == [[2.0 * number for number in row]]
            assert outputs["total"] == [sum(row)]
            assert outputs["length"] == [max(LENGTHS) if pad else len(row)]
        assert [answer["together"] for answer in answers] == ([4] * 4 if pad else [1, 2, 1, 2])


arrays = st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)).map(
    lambda shape: np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
)


@given(st.lists(arrays, min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_what_is_put_together_is_divided_again(parts: list[np.ndarray]) -> None:
    requests = [{"x": part, "mask": np.ones(part.shape[:2], bool)} for part in parts]
    assert len({shape_of(request, ["x", "mask"]) for request in requests}) == 1
    values = SharedValues.create()
    given = values.read(values.write(put_together(requests)), torch_tensors=False)
    assert given["x"].shape == (sum(map(len, parts)), *(max(part.shape[at] for part in parts) for at in (1, 2)))
    found = divided({"same": given["x"], "sums": given["x"].sum((1, 2))}, requests, [len(part) for part in parts])
    assert found is not None
    for part, own in zip(parts, found, strict=True):
        assert np.array_equal(own["same"], part)
        assert np.allclose(own["sums"], part.sum((1, 2)), atol=1e-5)
    values.close()
