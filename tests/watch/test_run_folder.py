"""The run folder: names, refusals, failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import InvalidInput
from paceline.watch.run_folder import Failure, RunFolder, choose_run_folder


def failure(replica: int, at: float, *, expected: bool = False) -> Failure:
    return Failure(
        time=at, replica=replica, kind="ValueError", sentence="no", traceback="Traceback: no", expected=expected
    )


def test_two_runs_in_the_same_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (choose_run_folder(None, "some/train.py") for _ in range(2))
    assert first != second
    assert all(path.is_dir() and path.parent == Path("runs") and "-train" in path.name for path in (first, second))


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    path = choose_run_folder(str(tmp_path / "here"), "train.py")
    folder = RunFolder(path, print)
    folder.write_config({"replicas": 2})
    folder.close()
    with pytest.raises(InvalidInput, match=r"run-folder is '.*here': it holds a run already"):
        choose_run_folder(str(path), "train.py")


def test_a_file_in_the_way_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("")
    with pytest.raises(InvalidInput, match=r"run-folder is '.*here': it cannot be made \(File exists\)"):
        choose_run_folder(str(tmp_path / "here"), "train.py")


def test_the_failure_that_came_first_wins_whatever_its_file_is_called(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, print)
    assert folder.first_failure() is None
    for replica, at in ((0, 7.0), (10, 5.0), (2, 6.0)):
        failure(replica, at).write(tmp_path)
    first = folder.first_failure()
    folder.close()
    assert first == failure(10, 5.0)
    assert folder.has_failure(2)
    assert not folder.has_failure(1)


def test_hosts_that_share_a_disk_see_the_same_first_failure(tmp_path: Path) -> None:
    host_1 = choose_run_folder(str(tmp_path), "train.py", host=1)
    assert host_1 == tmp_path / "host-1"
    folders = [RunFolder(tmp_path, print), RunFolder(host_1, print, host=1)]
    failure(0, 6.0).write(tmp_path)
    failure(2, 5.0).write(host_1)
    assert [folder.first_failure() for folder in folders] == [failure(2, 5.0)] * 2
    for folder in folders:
        folder.close()


def test_a_damaged_failure_file_does_not_hide_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    folder = RunFolder(tmp_path, said.append)
    (tmp_path / "replica-0.failure.json").write_text('{"time": 1.0, "repl')
    failure(1, 2.0).write(tmp_path)
    assert folder.first_failure() == failure(1, 2.0)
    folder.close()
    assert len(said) == 1
    assert "replica-0.failure.json" in said[0]


def test_an_error_of_paceline_is_shown_as_its_sentence_and_any_other_as_its_traceback() -> None:
    assert failure(0, 0.0, expected=True).text == "no"
    assert failure(0, 0.0).text == "Traceback: no"


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    gone = tmp_path / "gone"
    folder = RunFolder(gone, said.append)
    folder.write_config({})
    folder.events.write("started")
    folder.open_log(0).write(b"text")
    folder.close()
    assert said == [f"run folder {gone} cannot be written (No such file or directory): the run goes on without it"]
