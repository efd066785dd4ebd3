"""Descriptions of steps: what is cut up keeps its sums, and what cannot be run is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInput
from paceline.plan.mirrored_step import mirrored_step
from paceline.plan.servers_step import servers_step
from paceline.plan.step import (
    TOGETHER,
    LayerCost,
    Resource,
    StepCost,
    StepDescription,
    StepDraft,
    StepPiece,
    backward_runs,
)

layers = st.lists(st.builds(LayerCost, st.floats(0, 10), st.floats(0, 10), st.floats(0, 1e9)), min_size=1, max_size=30)


@given(layers, st.floats(1e3, 1e9), st.integers(1, 64))
def test_buckets_have_all_of_backward_and_all_bytes(layers: list[LayerCost], bucket_bytes: float, most: int) -> None:
    runs = backward_runs(layers, bucket_bytes, most)
    assert sum(run.seconds for run in runs) == pytest.approx(sum(layer.backward_s for layer in layers))
    assert sum(run.bytes for run in runs) == pytest.approx(sum(layer.bytes for layer in layers))
    assert len(runs) <= most + 1


def test_a_description_survives_json() -> None:
    step = servers_step(StepCost.whole(0.3, 1e6), replicas=2, servers=2, link=1e9)
    assert msgspec.json.decode(msgspec.json.encode(step), type=StepDescription) == step


def test_pieces_and_resources_have_the_names_that_explanations_use() -> None:
    step = mirrored_step(StepCost.whole(0.3, 1e6, input_s=0.1), replicas=4, hosts=2, link=1e9)
    assert {piece.name for piece in step.pieces} == {
        *("load", "forward", "backward", "sum", "reduce", "add", "gather", "update", "meet")
    }
    assert {resource.name for resource in step.resources} == {
        *("replica's core", "replica's input", "hosts' links", "hosts' memory")
    }


CORE = (Resource("replica's core"), Resource("replica's link"))


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (StepPiece("a", "think", 0), "a should be one of compute"),  # type: ignore[arg-type]
        (StepPiece("a", "compute", 0, seconds=-1.0), "seconds and bytes from 0 up"),
        (StepPiece("a", "compute", 0, seconds=float("nan")), "seconds and bytes from 0 up"),
        (StepPiece("a", "compute", 2), "one of 2 participants"),
        (StepPiece("a", "compute", TOGETHER - 1), "one of 2 participants"),
        (StepPiece("a", "compute", 0, turn=1), "one of 2 participants"),
        (StepPiece("a", "compute", 0, after=(1,)), "after pieces that stand before it"),
        (StepPiece("a", "compute", 0, on=(7,)), "one of 2 resources"),
        (StepPiece("a", "compute", 0, on=(0, 1)), "at most one that works in turn"),
    ],
)
def test_a_piece_that_could_not_be_done_is_refused(piece: StepPiece, said: str) -> None:
    good = StepPiece("good", "compute", 0)
    with pytest.raises(InvalidInput, match=said):
        StepDescription("made up", 2, CORE, (piece if piece.after else good, piece)[-1:], "all").check()


def test_only_what_waits_for_all_may_wait_for_others() -> None:
    made = StepDraft()
    first = made.piece("a", "compute", 0, [])
    made.piece("b", "compute", 1, [], after=[first])
    assert made.step("made up", 2, "all").participants == 2
    with pytest.raises(InvalidInput, match="its own turn only"):
        made.step("made up", 2, "each")
    with pytest.raises(InvalidInput, match="accept is 3"):
        made.step("made up", 2, 3)
