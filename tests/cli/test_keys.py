"""`paceline keys`: what is made can be used, nothing is replaced unasked, and no key is readable by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.net.secure import Keys

MAIN = "import sys; from paceline.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    try:
        found: object = main(["keys", *arguments])
    except SystemExit as exit:
        found = exit.code
    out, err = capsys.readouterr()
    assert found == code, err
    if code == 2:
        assert out == ""
        assert err.startswith("paceline: ")
        assert err.count("\n") == 1
        return err.removeprefix("paceline: ").rstrip("\n")
    assert err == ""
    return out


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def test_make_makes_keys_that_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0)
    try:
        said(capsys, "make", "deep/keys", "--name", "node0")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path("deep/keys").iterdir()}
    keys = ["ca.key", "server.key", "client.key"]
    assert modes == dict.fromkeys(keys, 0o600) | {name.replace("key", "pem"): 0o644 for name in keys}
    assert Path("deep/keys").stat().st_mode & 0o777 == 0o700
    loaded = Keys.load(Path("deep/keys"))
    loaded.server_context()
    loaded.client_context()


def test_nothing_is_replaced_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "make", "keys", "--name", "node0")
    made = contents("keys")
    sentence = said(capsys, "make", "keys", "--name", "node0", code=2)
    assert sentence == "keys/ca.pem is there already: give another folder, or --force to replace it"
    for role in ("server", "client"):
        assert f"keys/{role}.pem is there already" in said(capsys, role, "keys", "--name", "x", code=2)
    assert contents("keys") == made
    said(capsys, "client", "keys", "--name", "x", "--force")
    changed = {name for name, data in contents("keys").items() if data != made[name]}
    assert changed == {"client.pem", "client.key"}
    said(capsys, "make", "keys", "--name", "node0", "--force")
    assert not set(contents("keys").values()) & set(made.values())
    Keys.load(Path("keys"))


@pytest.mark.parametrize("left", ["ca.key", "server.key", "client.pem"])
def test_make_looks_before_it_writes(capsys: pytest.CaptureFixture[str], left: str) -> None:
    Path("keys").mkdir()
    Path("keys", left).write_text("precious")
    assert f"keys/{left} is there already" in said(capsys, "make", "keys", "--name", "a", code=2)
    assert contents("keys") == {left: b"precious"}


def test_keys_for_another_machine_come_without_the_key_of_the_authority(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "make", "keys", "--name", "node0")
    said(capsys, "server", "keys", "--name", "10.0.0.2", "--to", "node1")
    assert sorted(contents("node1")) == ["ca.pem", "server.key", "server.pem"]
    said(capsys, "client", "keys", "--name", "node1", "--to", "node1")  # the other role may join
    Keys.load(Path("node1"))
    said(capsys, "make", "others", "--name", "node0")
    sentence = said(capsys, "client", "others", "--name", "x", "--to", "node1", code=2)
    assert sentence == "node1 holds keys of another CA: give another folder, or --force to replace them"
    Keys.load(Path("node1"))


def test_show_tells_who_signed_what(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "make", "keys", "--name", "node0", "--days", "30")
    lines = said(capsys, "show", "keys").splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ca.pem", "CA"],
        ["server.pem", "server"],
        ["client.pem", "client"],
    ]
    assert "signed by itself" in lines[0]
    assert "signed by paceline CA node0" in lines[1]
    shown = json.loads(said(capsys, "show", "keys", "--json"))
    assert [row["role"] for row in shown] == ["CA", "server", "client"]
    assert [row["name"] for row in shown] == ["paceline CA node0", "node0", "node0"]
    assert all(row["wrong"] is None and row["has_key"] for row in shown)
    assert shown[0]["until"] > shown[1]["until"]


def test_show_finds_what_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "make", "keys", "--name", "node0")
    said(capsys, "make", "others", "--name", "node0")
    for end in ("pem", "key"):
        Path(f"others/client.{end}").replace(f"keys/client.{end}")
    Path("keys/server.key").unlink()
    Path("keys/ca.key").unlink()
    assert "wrong: keys/client.pem is signed by another CA" in said(capsys, "show", "keys", code=1)
    shown = json.loads(said(capsys, "show", "keys", "--json", code=1))
    assert [row["has_key"] for row in shown] == [False, False, True]
    assert [row["wrong"] for row in shown] == [
        None,
        "there is no server.key in keys",
        "keys/client.pem is signed by another CA",
    ]


SENTENCES = {
    "": "ACTION, FOLDER is missing: paceline keys --help shows how",
    "make": "FOLDER is missing: paceline keys --help shows how",
    "mkae keys": "action is 'mkae': did you mean make?",
    "dance keys": "action is 'dance': give one of make, server, client, show",
    "make keys": "--name is missing: give the name of the machine or the person the keys are for",
    "client keys": "--name is missing: give the name of the machine or the person the keys are for",
    "make keys --name a/b": "name is 'a/b': give a host name, an address or a word of at most 50 letters",
    "make keys --name ö": "name is 'ö': give a host name",
    "make keys --name a --days 0": "days is '0': give a whole number from 1 up",
    "make keys --name a --days 99999999": "days is 99999999: give at most 36500",
    "make keys --name a --to b": "to is 'b': make puts everything into FOLDER, leave it out",
    "make keys --nmae a": "there is no flag --nmae: did you mean --name?",
    "make file --name a": "the folder file cannot be made: File exists",
    "client keys --name a": "there is no ca.pem in keys",
    "show keys": "there is no folder keys with keys: paceline keys make keys makes one",
    "show empty": "there is no certificate in empty",
    "show damaged": "damaged/ca.pem cannot be read, or is not a certificate in PEM format",
    "server damaged --name a": "damaged/ca.pem cannot be read, or is not a certificate in PEM format",
}


@pytest.mark.parametrize("typed", SENTENCES)
def test_mistakes_are_told_in_one_sentence(capsys: pytest.CaptureFixture[str], typed: str) -> None:
    Path("file").write_text("")
    Path("empty").mkdir()
    Path("damaged").mkdir()
    Path("damaged/ca.pem").write_text("nonsense")
    Path("damaged/ca.key").write_text("nonsense")
    assert said(capsys, *typed.split(), code=2).startswith(SENTENCES[typed])
    assert not Path("keys").exists()


def test_a_key_of_another_authority_signs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("keys", "others"):
        said(capsys, "make", folder, "--name", "a")
    Path("others/ca.key").replace("keys/ca.key")
    sentence = said(capsys, "client", "keys", "--name", "b", "--to", "b", code=2)
    assert sentence == "keys/ca.key does not belong to ca.pem"
    assert not Path("b").exists()


def test_help_needs_neither_torch_nor_cryptography() -> None:
    code = f"import sys; sys.modules['torch'] = sys.modules['cryptography'] = None; {MAIN}"
    shown = subprocess.run(
        [sys.executable, "-c", code, "keys", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "paceline keys make keys --name node0" in shown.stdout
    assert "without ca.key" in shown.stdout


def test_without_cryptography_it_says_what_to_install() -> None:
    code = f"import sys; sys.modules['cryptography'] = None; {MAIN}"
    refused = subprocess.run(
        [sys.executable, "-c", code, "keys", "make", "keys", "--name", "a"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr == "paceline: paceline keys needs the package cryptography: pip install 'paceline[tls]'\n"
