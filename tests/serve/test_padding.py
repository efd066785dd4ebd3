"""`--pad`: requests of several sizes go together, each with zeros behind its numbers, and each gets its own part."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import LONG_S, Served

from paceline.serve.row_batches import PaddedSizes, put_together, shape_of
from paceline.serve.shared_values import SharedValues

SCRIPT = Path(__file__).parent / "padded_script.py"
LENGTHS = (2, 5, 3, 5)


@pytest.mark.parametrize(
    ("pad", "before", "together"),
    [
        pytest.param(True, [555, 1], [4] * 4, id="padded"),
        pytest.param(True, [555, 1, 1, 1, 1], [1] * 4, id="padded before another length was seen"),
        pytest.param(False, [555, 1], [1, 2, 1, 2], id="not padded"),
    ],
)
def test_requests_of_several_sizes_go_together_only_if_asked(
    tmp_path: Path, pad: bool, before: list[int], together: list[int]
) -> None:
    flags = ["--input", "ids:INT64:-1,-1", *(["--pad"] if pad else [])]
    with Served(tmp_path, *flags, script=SCRIPT) as served, ThreadPoolExecutor(8) as pool:

        def ask(row: list[int]) -> dict[str, object]:
            answer = served.client.post("/predict", json=[row], headers={"Paceline-Deadline": str(LONG_S)})
            assert answer.status_code == 200, answer.text
            told: dict[str, object] = answer.json()
            return told

        served.hold()
        held = pool.submit(ask, before)
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
            assert outputs["length"] == [max(LENGTHS) if together[0] == 4 else len(row)]
            assert outputs["classes"] == [[sum(row) + number for number in range(5)]]  # as many as the longest row
        assert [answer["together"] for answer in answers] == together


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
    sizes = PaddedSizes(["x", "mask"])
    for shape in ((1, 5, 6), (1, 6, 7)):
        small = np.ones(shape, np.float32)
        assert sizes.learn(_same_and_sums(small), [{"x": small, "mask": np.ones(shape[:2], bool)}])
    assert sizes.learn(_same_and_sums(given["x"]), requests)
    found = sizes.divided(_same_and_sums(given["x"]), requests, [len(part) for part in parts])
    assert found is not None
    for part, own in zip(parts, found, strict=True):
        assert np.array_equal(own["same"], part)
        assert np.allclose(own["sums"], part.sum((1, 2)), atol=1e-5)
    values.close()


def _same_and_sums(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"same": x, "sums": x.sum((1, 2))}


def ids(*lengths: int, **others: int) -> list[dict[str, np.ndarray]]:
    """Requests of one row each, with ids of these lengths, and other inputs of their own."""
    return [{"ids": np.ones((1, one))} | {name: np.ones((1, size)) for name, size in others.items()} for one in lengths]


def shapes(parts: list[dict[str, np.ndarray]] | None) -> list[tuple[int, ...]] | None:
    return None if parts is None else [part["y"].shape[1:] for part in parts]


def test_what_merely_has_the_size_of_the_longest_is_not_cut() -> None:
    sizes, both = PaddedSizes(["ids"]), ids(7, 10)
    answer = {"y": np.ones((2, 10))}
    assert sizes.learn(answer, both)
    assert sizes.divided(answer, both, [1, 1]) is None  # ten classes, or the longest request: nobody can tell yet
    assert sizes.learn({"y": np.ones((1, 10))}, ids(7))
    assert shapes(sizes.divided(answer, both, [1, 1])) == [(10,), (10,)]


def test_an_input_that_is_not_padded_says_nothing_about_what_is_cut() -> None:
    sizes, both = PaddedSizes(["ids"]), ids(5, 9, features=64)
    assert sizes.learn({"y": np.ones((1, 5))}, ids(5, features=64))
    answer = {"y": np.ones((2, 9))}
    assert sizes.learn(answer, both)
    assert shapes(sizes.divided(answer, both, [1, 1])) == [(5,), (9,)]


def test_of_two_padded_inputs_each_output_is_cut_to_the_one_that_it_follows() -> None:
    sizes = PaddedSizes(["ids", "other"])
    both = ids(5, other=8) + ids(9, other=3)
    answer = {"y": np.ones((2, 8, 9))}
    for known in (ids(5, other=5), ids(6, other=6)):
        assert sizes.learn({"y": np.ones((1, *[len(known[0]["ids"][0])] * 2))}, known)
    assert sizes.learn(answer, both)
    assert shapes(sizes.divided(answer, both, [1, 1])) == [(8, 5), (3, 9)]
    apart = PaddedSizes(["ids", "other"])
    for length in (5, 6):
        apart.learn({"y": np.ones((1, length))}, ids(length, other=length))
    answer, both = {"y": np.ones((2, 9))}, ids(5, other=9) + ids(9, other=5)
    assert apart.learn(answer, both)
    assert apart.divided(answer, both, [1, 1]) is None  # it may be either's
    assert apart.learn({"y": np.ones((1, 9))}, ids(5, other=9))
    assert shapes(apart.divided(answer, both, [1, 1])) == [(9,), (5,)]


def test_a_size_that_follows_from_nothing_known_ends_the_padding() -> None:
    sizes, both = PaddedSizes(["ids"]), ids(5, 9)
    assert sizes.learn({"y": np.ones((1, 6))}, ids(5))  # one more than ids
    assert not sizes.learn({"y": np.ones((2, 10))}, both)
    assert sizes.pads == frozenset()
    assert sizes.divided({"y": np.ones((2, 10))}, both, [1, 1]) is None
    assert sizes.learn({"y": np.ones((1, 4))}, ids(3))  # it is said once
    alike = ids(5, 5)
    assert shapes(sizes.divided({"y": np.ones((2, 6))}, alike, [1, 1])) == [(6,), (6,)]
