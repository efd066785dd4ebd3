"""Checkpoints on a real disk: whole or refused, under truncation, bit flips, kills and a full disk."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import checkpoint
from paceline.errors import CheckpointError, InvalidInput

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.complex64, torch.bool),
]


class Tied(torch.nn.Module):
    """A transformer's head in small: the embedding is the output layer too, and one weight is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.half = torch.nn.Linear(4, 4).to(torch.bfloat16)
        self.transposed = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def numbered(step: int, size: int = 50) -> dict[str, Any]:
    """A save in which every tensor and the notes carry the same step."""
    return {
        "model": {"weight": torch.full((size,), float(step)), "count": torch.tensor(step)},
        "training": {"0.exp_avg": torch.full((size,), float(step), dtype=torch.float64)},
        "notes": {"step": step},
    }


def step_of(saved: checkpoint.Checkpoint) -> int:
    """The step of a `numbered` save, after checking that each of its numbers is of that step."""
    step = saved.notes["step"]
    for tensor in (*saved.model.values(), *saved.training.values()):
        assert torch.equal(tensor, torch.full_like(tensor, step))
    assert saved.model.keys() == {"weight", "count"}
    assert saved.training.keys() == {"0.exp_avg"}
    return int(step)


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(
        a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
        for a, b in zip(found.values(), expected.values(), strict=True)
    )


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def training_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.training.safetensors"))


def refusal(path: Path, *, fall_back: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path, fall_back=fall_back)
    return str(caught.value)


def failure(path: Path, **save: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.write(path, **save)
    return str(caught.value)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond this, as on a full disk; needs no root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ── What goes in comes out ──────────────────────────────────────────────────────────────────────────────────────


def test_a_save_comes_back_bit_for_bit_and_in_order(tmp_path: Path) -> None:
    model = Tied().state_dict()
    training = {"1.momentum": torch.randn(3, 2).t(), "0.step": torch.tensor(7), "empty": torch.zeros(0, 3)}
    notes = {"step": 1200, "best": float("inf"), "schedule": {"lr": [0.1, 1e-30]}, "run": "Zürich 🚲"}
    checkpoint.write(tmp_path / "model.safetensors", model, training, notes)
    saved = checkpoint.read(tmp_path / "model.safetensors")
    assert saved.path == tmp_path / "model.safetensors"
    assert saved.notes == notes
    assert same_bits(saved.model, model)
    assert same_bits(saved.training, training)


def test_plain_torch_loads_the_model_file_strictly(tmp_path: Path) -> None:
    model, fresh = Tied(), Tied()
    checkpoint.write(tmp_path / "model.safetensors", model.state_dict(), {"x": torch.ones(2)}, {})
    fresh.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=True)
    assert same_bits(fresh.state_dict(), model.state_dict())
    assert fresh.head.weight is fresh.embedding.weight


def test_a_save_without_training_tensors_or_notes_is_one_too(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "model.safetensors", {}, {}, {})
    saved = checkpoint.read(tmp_path / "model.safetensors")
    assert (saved.model, saved.training, saved.notes) == ({}, {}, {})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_tensors_come_back_bit_for_bit(tmp_path: Path, data: st.DataObject) -> None:
    def tensor() -> torch.Tensor:
        dtype = data.draw(st.sampled_from(DTYPES))
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        wide = torch.zeros(shape, dtype=dtype).nbytes
        bits = torch.tensor(list(data.draw(st.binary(min_size=wide, max_size=wide))), dtype=torch.uint8)
        if dtype == torch.bool:
            bits &= 1
        return bits.view(dtype).reshape(shape) if wide else torch.zeros(shape, dtype=dtype)

    keys = st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4, unique=True)
    model = {name: tensor() for name in data.draw(keys)}
    training = {name: tensor() for name in data.draw(keys)}
    checkpoint.write(tmp_path / "any.safetensors", model, training, {"step": 3})
    saved = checkpoint.read(tmp_path / "any.safetensors")
    assert same_bits(saved.model, model)
    assert same_bits(saved.training, training)


def test_a_conjugated_view_is_saved_as_the_numbers_it_shows(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    checkpoint.write(tmp_path / "model.safetensors", {"conjugated": tensor.conj()}, {}, {})
    assert checkpoint.read(tmp_path / "model.safetensors").model["conjugated"].tolist() == [1 - 2j, 3 + 4j]


def test_writing_to_a_loaded_tensor_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "model.safetensors", **numbered(4))
    checkpoint.read(tmp_path / "model.safetensors").model["weight"].zero_()
    assert step_of(checkpoint.read(tmp_path / "model.safetensors")) == 4


def test_a_link_to_a_checkpoint_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "latest.safetensors"
    link.symlink_to(tmp_path / "disk" / "model.safetensors")
    for step in (1, 2):
        checkpoint.write(link, **numbered(step))
    assert link.is_symlink()
    assert step_of(checkpoint.read(link)) == 2
    assert names(tmp_path) == {"disk", "latest.safetensors"}


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        checkpoint.write(tmp_path / "model.safetensors", **numbered(1))
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's peak memory counter")
def test_saving_and_loading_a_large_model_copies_none_of_it(tmp_path: Path) -> None:
    def kilobytes(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1])

    weight = torch.ones(16 << 20)  # 64 MB, saved three times over
    checkpoint.write(tmp_path / "warm.safetensors", **numbered(1))
    Path("/proc/self/clear_refs").write_text("5")  # starts VmHWM, the peak, again from here
    before = kilobytes("VmRSS")
    checkpoint.write(tmp_path / "model.safetensors", {"a": weight, "tied": weight}, {"b": weight}, {})
    assert kilobytes("VmHWM") - before < 20_000
    before = kilobytes("RssAnon")
    saved = checkpoint.read(tmp_path / "model.safetensors")
    assert kilobytes("RssAnon") - before < 20_000
    assert float(saved.training["b"].sum()) == 16 << 20


# ── Saves that replace one another ──────────────────────────────────────────────────────────────────────────────


def test_keep_rotates_and_old_training_files_vanish(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for step in range(1, 6):
        checkpoint.write(path, **numbered(step), keep=3)
    assert step_of(checkpoint.read(path)) == 5
    assert step_of(checkpoint.read(tmp_path / "model.previous.safetensors")) == 4
    assert step_of(checkpoint.read(tmp_path / "model.previous-2.safetensors")) == 3
    assert len(training_files(tmp_path)) == 3
    assert len(names(tmp_path)) == 6
    assert [file.name.rsplit("-", 1)[0] for file in training_files(tmp_path)] == [f"model.step-{n}" for n in (3, 4, 5)]
    checkpoint.write(path, **numbered(6), keep=1)
    assert step_of(checkpoint.read(path)) == 6
    assert names(tmp_path) == {"model.safetensors", training_files(tmp_path)[0].name}


def test_a_gap_between_kept_saves_is_filled_before_one_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for step in range(1, 5):
        checkpoint.write(path, **numbered(step), keep=4)
    (tmp_path / "model.previous.safetensors").unlink()  # of step 3
    checkpoint.write(path, **numbered(5), keep=4)
    kept = [step_of(checkpoint.read(tmp_path / f"model.previous{age}.safetensors")) for age in ("", "-2", "-3")]
    assert kept == [4, 2, 1]


def test_two_checkpoints_in_one_folder_do_not_touch_one_another(tmp_path: Path) -> None:
    stems = ["model", "model.best", "model-2", "mode", "model.step-3-00c0ffee", "m[od]el"]
    for stem in stems:
        checkpoint.write(tmp_path / f"{stem}.safetensors", **numbered(1))
        (tmp_path / f".{stem}.00000000.model.partial").touch()
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in names(tmp_path)}
    for step in (2, 3, 4):
        checkpoint.write(tmp_path / "model.safetensors", **numbered(step))
    for name, mtime in before.items():
        if not name.startswith(("model.safetensors", "model.step-1-", ".model.00000000")):
            assert (tmp_path / name).stat().st_mtime_ns == mtime
    assert not (tmp_path / ".model.00000000.model.partial").exists()
    assert [step_of(checkpoint.read(tmp_path / f"{stem}.safetensors")) for stem in stems] == [4, 1, 1, 1, 1, 1]


def test_a_copy_the_user_made_keeps_its_training_file(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "model.safetensors", **numbered(1))
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "best.safetensors")
    for step in (2, 3, 4):
        checkpoint.write(tmp_path / "model.safetensors", **numbered(step))
    assert step_of(checkpoint.read(tmp_path / "best.safetensors")) == 1


def test_a_save_that_fails_beside_a_damaged_one_removes_no_training_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with file_size_limit(1_000_000):
        assert "File too large" in failure(path, **numbered(2, size=500_000))
    path.write_bytes(whole)  # from somebody's backup
    assert step_of(checkpoint.read(path)) == 1


def test_a_damaged_newest_save_does_not_push_out_the_good_one_before(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for step in (1, 2):
        checkpoint.write(path, **numbered(step))
    path.write_bytes(path.read_bytes()[:-1])
    checkpoint.write(path, **numbered(3))
    assert step_of(checkpoint.read(path)) == 3
    assert step_of(checkpoint.read(tmp_path / "model.previous.safetensors")) == 1


# ── Damage is refused ───────────────────────────────────────────────────────────────────────────────────────────


def refusal_if_any(path: Path) -> str:
    """Why a save of step 1 is refused; nothing if it is accepted, and then it holds what was saved."""
    try:
        saved = checkpoint.read(path)
    except CheckpointError as error:
        return str(error)
    assert step_of(saved) == 1
    return ""


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1, size=5))
    for file in (path, *training_files(tmp_path)):
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            assert file.name in refusal(path)
        file.write_bytes(whole + b"\0")
        assert file.name in refusal(path)
        file.write_bytes(whole)
    assert step_of(checkpoint.read(path)) == 1


def test_a_flipped_bit_anywhere_is_refused_or_without_effect(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1, size=5))
    accepted = []
    for file in (path, *training_files(tmp_path)):
        whole = bytearray(file.read_bytes())
        for position in range(len(whole)):
            whole[position] ^= 1 << position % 8
            file.write_bytes(whole)
            whole[position] ^= 1 << position % 8
            reason = refusal_if_any(path)
            assert file.name in reason or not reason
            accepted += [] if reason else [position]
        file.write_bytes(whole)
    assert len(accepted) <= len('"format":"pt"')  # which we write for others and do not read


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_overwritten_bytes_never_come_back_as_other_numbers(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    if not path.exists():
        checkpoint.write(path, **numbered(1, size=5))
    file = data.draw(st.sampled_from([path, *training_files(tmp_path)]))
    whole = file.read_bytes()
    start = data.draw(st.integers(0, len(whole) - 1))
    damage = data.draw(st.binary(max_size=40) | st.sampled_from([b'"', b"[]", b"{", b"9", b"F16", b"\xff" * 8]))
    removed = data.draw(st.sampled_from([len(damage), 0, 1]))
    file.write_bytes(whole[:start] + damage + whole[start + removed :])
    try:
        reason = refusal_if_any(path)
    finally:
        file.write_bytes(whole)
    assert file.name in reason or not reason


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1))
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1  # in the last tensor of the narrowest dtype
    path.write_bytes(whole)
    assert "tensor 'weight' has checksum" in refusal(path)


def test_a_tensor_of_the_same_bytes_under_another_dtype_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1))
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    assert "tensor 'weight' has checksum" in refusal(path)


def rewritten(path: Path, **changes: str) -> None:
    """Write the model file again with other metadata, as another program might."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **changes}
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, metadata=metadata)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"save":1}', "[" * 100_000, '{"save":"","notes":[]}'])
def test_notes_that_are_not_ours_are_refused_even_with_a_right_checksum(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1))
    rewritten(path, **{"paceline.contents": text, "paceline.contents.crc32": f"{zlib.crc32(text.encode()):08x}"})
    assert "its notes are not as they should be" in refusal(path)


def test_another_format_version_is_refused_and_keeps_its_training_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1))
    rewritten(path, paceline="3")
    assert "is a checkpoint of format '3', and this Paceline reads '2'" in refusal(path)
    checkpoint.write(path, **numbered(2))
    assert len(training_files(tmp_path)) == 2


@pytest.mark.parametrize("name", ["", "../model.00000000.training.safetensors", "model.safetensors"])
def test_a_model_file_cannot_name_any_file_as_its_training_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1))
    rewritten(path, **{"paceline.training_file": name})
    assert f"{name!r} does not name a training file" in refusal(path)


def test_a_training_file_that_is_missing_or_of_another_save_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for step in (1, 2):
        checkpoint.write(path, **numbered(step))
    older, newer = training_files(tmp_path)
    shutil.copy(older, newer)
    assert f"{newer} is of save {older.name[13:21]}, but {path} is of save {newer.name[13:21]}" in refusal(path)
    newer.unlink()
    assert f"{path} is without its training file {newer.name}" in refusal(path)


def test_what_is_no_checkpoint_is_refused_by_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert refusal(path) == f"{path} does not exist"
    assert refusal(tmp_path) == f"{tmp_path} is not a file: name a .safetensors file"
    path.write_text("hello, world")
    assert refusal(path).startswith(f"{path} is cut short, damaged or not a safetensors file")
    safetensors.torch.save_file({"weight": torch.ones(3)}, path)
    assert refusal(path).startswith(f"{path} holds a model but no training state: load it with model.load_state_dict(")


def test_fall_back_uses_the_newest_save_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for step in (1, 2, 3):
        checkpoint.write(path, **numbered(step), keep=3)
    assert checkpoint.read(path, fall_back=True).path == path
    path.write_bytes(path.read_bytes()[:-1])
    saved = checkpoint.read(path, fall_back=True)
    assert (saved.path.name, step_of(saved)) == ("model.previous.safetensors", 2)
    training_files(tmp_path)[1].unlink()
    saved = checkpoint.read(path, fall_back=True)
    assert (saved.path.name, step_of(saved)) == ("model.previous-2.safetensors", 1)
    path.unlink()
    assert step_of(checkpoint.read(path, fall_back=True)) == 1
    (tmp_path / "model.previous-2.safetensors").write_bytes(b"")
    message = refusal(path, fall_back=True)
    assert f"{path} does not exist; and " in message
    assert f"{tmp_path / 'model.previous.safetensors'} is without its training file" in message
    assert f"; and {tmp_path / 'model.previous-2.safetensors'} is cut short" in message


# ── Input that cannot be saved ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (3, "model['x'] is 'int': give a tensor"),
        (torch.eye(2).to_sparse(), "model['x'].layout is torch.sparse_coo: make it dense with to_dense()"),
        (torch.ones(2, device="meta"), "model['x'].device is 'meta': give the tensor memory first"),
        (torch.ones(2, dtype=torch.complex128), "model['x'].dtype is torch.complex128: use one of torch.float64"),
    ],
)
def test_a_tensor_the_format_cannot_hold_is_named(tmp_path: Path, tensor: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checkpoint.write(tmp_path / "model.safetensors", {"x": tensor}, {}, {})
    assert message in str(caught.value)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.pt", "give a file name that ends in .safetensors"),
        ("model.previous.safetensors", "give another name"),
        ("model.previous-2.safetensors", "give another name"),
        ("model.step-1-00c0ffee.training.safetensors", "give another name"),
    ],
)
def test_a_name_that_would_clash_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        checkpoint.write(tmp_path / name, **numbered(1))


def test_keep_below_one_and_a_reserved_tensor_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="keep is 0: give a whole number from 1 up"):
        checkpoint.write(tmp_path / "model.safetensors", **numbered(1), keep=0)
    with pytest.raises(InvalidInput, match="training is '__metadata__': rename this tensor"):
        checkpoint.write(tmp_path / "model.safetensors", {}, {"__metadata__": torch.ones(1)}, {})


def test_notes_that_are_no_json_or_too_long_are_refused_before_the_old_save_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1))
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=r"notes cannot be saved as JSON \(.*Tensor is not JSON serializable\)"):
        checkpoint.write(path, {}, {}, {"step": torch.tensor(2)})
    with pytest.raises(CheckpointError, match=r"make a header of 100,000,\d+ bytes: safetensors reads up to"):
        checkpoint.write(path, {}, {}, {"text": "x" * 100_000_000})
    assert names(tmp_path) == before
    assert step_of(checkpoint.read(path)) == 1


# ── A disk that does not take it ────────────────────────────────────────────────────────────────────────────────


@contextmanager
def as_nobody() -> Iterator[Path]:
    """A folder that is open to all, outside of pytest's own private ones, and no root's privileges in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o777)
        checkpoint.write(path / "model.safetensors", **numbered(1))
        os.seteuid(65534)
        try:
            yield path
        finally:
            os.seteuid(0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
def test_a_full_disk_leaves_the_old_save_and_nothing_else(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        path = disk / "model.safetensors"
        checkpoint.write(path, **numbered(1))
        before = {file: file.read_bytes() for file in disk.iterdir()}
        message = failure(path, **numbered(2, size=500_000))
        free = shutil.disk_usage(disk).free / 1e6
        expected = f"checkpoint {path} could not be saved (No space left on device): it needs 6.0 MB and {free:.1f} MB"
        assert message == f"{expected} are free"
        assert {file: file.read_bytes() for file in disk.iterdir()} == before
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_file_size_limit_leaves_the_old_save_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with file_size_limit(1_000_000):
        message = failure(path, **numbered(2, size=500_000))
    assert "could not be saved (File too large): it needs 6.0 MB" in message
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@needs_root
def test_a_folder_without_permission_is_said() -> None:
    with as_nobody() as folder:
        os.seteuid(0)
        folder.chmod(0o755)
        os.seteuid(65534)
        message = failure(folder / "model.safetensors", **numbered(2))
        assert "could not be saved (Permission denied): it needs 0.0 MB and" in message
        assert step_of(checkpoint.read(folder / "model.safetensors")) == 1


@needs_root
def test_a_save_that_may_not_be_linked_is_copied_to_previous() -> None:
    with as_nobody() as folder:  # Linux lets nobody link root's file, but replace it in an open folder
        checkpoint.write(folder / "model.safetensors", **numbered(2))
        assert step_of(checkpoint.read(folder / "model.safetensors")) == 2
        assert step_of(checkpoint.read(folder / "model.previous.safetensors")) == 1


@needs_root
def test_a_file_that_may_not_be_read_is_said() -> None:
    with as_nobody() as folder:
        os.seteuid(0)
        (folder / "model.safetensors").chmod(0)
        os.seteuid(65534)
        assert "could not be read (Permission denied" in refusal(folder / "model.safetensors")


def test_a_missing_folder_and_a_folder_in_the_way_are_said(tmp_path: Path) -> None:
    path = tmp_path / "none" / "model.safetensors"
    assert failure(path, **numbered(1)).endswith(f"could not be saved: there is no folder {path.parent}")
    path.mkdir(parents=True)
    assert failure(path, **numbered(1)).endswith("could not be saved: there is a folder of that name")
    assert "could not be saved (File name too long)" in failure(tmp_path / f"{'x' * 250}.safetensors", **numbered(1))


# ── Kills ───────────────────────────────────────────────────────────────────────────────────────────────────────

# A process that has imported torch once and then forks a child for each thing to be killed.
SAVER = """
import itertools, os, signal, sys
from pathlib import Path
import torch
from paceline import checkpoint
from tests.test_checkpoint import numbered, step_of
torch.set_num_threads(1)

def saves_forever(path, keep):
    step = step_of(checkpoint.read(path)) if path.exists() else 0
    for step in itertools.count(step + 1):
        checkpoint.write(path, **numbered(step, size=20_000), keep=keep)

def saves_once(path, keep, touch, end):
    seen = itertools.count()
    def hook(event, arguments):
        if event in ("open", "os.rename", "os.link", "os.remove", "os.listdir", "os.scandir"):
            if str(path.parent) in str(arguments) and next(seen) == touch:
                end()
    sys.addaudithook(hook)
    checkpoint.write(path, **numbered(4), keep=keep)

def interrupt():
    raise KeyboardInterrupt

endings = {"killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "interrupted": interrupt}
for line in sys.stdin:
    kind, path, keep, touch = line.split()
    child = os.fork()
    if not child:
        try:
            if kind == "forever":
                saves_forever(Path(path), int(keep))
            saves_once(Path(path), int(keep), int(touch), endings[kind])
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Saver:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SAVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
            start_new_session=True,  # a group of its own, to be ended with all its children
        )

    @contextmanager
    def saving(self, path: Path, *, keep: int) -> Iterator[None]:
        """A process that saves one step after the other, and is killed in the end."""
        child = self._start("forever", path, keep, 0)
        try:
            yield
        finally:
            os.kill(child, signal.SIGKILL)
            assert self._answer() == -signal.SIGKILL

    def save_once(self, path: Path, *, keep: int, ending: str, touch: int) -> int:
        """Save step 4 in a process that ends as said before it touches a file for the n-th time: its exit code."""
        self._start(ending, path, keep, touch)
        return self._answer()

    def _start(self, kind: str, path: Path, keep: int, touch: int) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind} {path} {keep} {touch}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    saver = Saver()
    with saver.process:
        yield saver
        os.killpg(saver.process.pid, signal.SIGKILL)


def test_kills_at_random_moments_leave_a_whole_save(saver: Saver, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    moments = random.Random(0)
    last = 0
    for _ in range(15):
        with saver.saving(path, keep=2):
            while not (path.exists() and checkpoint.read(path).notes["step"] > last):
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.03))
        step = step_of(checkpoint.read(path))
        assert step > last
        last = step
        if (previous := tmp_path / "model.previous.safetensors").exists():
            assert step_of(checkpoint.read(previous)) < step
    checkpoint.write(path, **numbered(last + 1))
    assert len(names(tmp_path)) == 4  # two saves of two files: nothing of the killed ones stays


@pytest.mark.parametrize(("ending", "expected_code"), [("killed", -signal.SIGKILL), ("interrupted", 1)])
def test_an_end_before_any_touch_of_a_file_leaves_the_old_or_the_new_save(
    saver: Saver, tmp_path: Path, ending: str, expected_code: int
) -> None:
    steps = []
    for touch in range(100):
        path = tmp_path / str(touch) / "model.safetensors"
        path.parent.mkdir()
        for step in (1, 2, 3):
            checkpoint.write(path, **numbered(step), keep=3)
        exit_code = saver.save_once(path, keep=3, ending=ending, touch=touch)
        steps.append(step_of(checkpoint.read(path)))
        found = [step_of(checkpoint.read(file)) for file in path.parent.glob("model.previous*")]
        assert 1 <= len(found) <= 2
        assert steps[-1] not in found
        checkpoint.write(path, **numbered(5), keep=3)
        assert step_of(checkpoint.read(path)) == 5
        assert len(names(path.parent)) in (4, 6)
        if exit_code == 0:
            break
        assert exit_code == expected_code
    assert set(steps) == {3, 4}
    assert steps == sorted(steps)
    assert len(steps) > 10


def test_a_kill_while_a_damaged_save_is_replaced_leaves_the_good_one_before_it(saver: Saver, tmp_path: Path) -> None:
    for touch in range(100):
        path = tmp_path / str(touch) / "model.safetensors"
        path.parent.mkdir()
        for step in (1, 2, 3):
            checkpoint.write(path, **numbered(step), keep=2)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        exit_code = saver.save_once(path, keep=2, ending="killed", touch=touch)
        assert step_of(checkpoint.read(path, fall_back=True)) in (2, 4)
        if exit_code == 0:
            break
    assert step_of(checkpoint.read(path)) == 4


def test_a_reader_never_sees_a_save_half_replaced(saver: Saver, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, **numbered(1), keep=1)
    with saver.saving(path, keep=1):
        steps = [step_of(checkpoint.read(path)) for _ in range(300)]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]
