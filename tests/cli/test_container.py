"""`paceline container`: what it prints, what it refuses, and that a saved file is the model."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.central.client.client import Client, ServerAddresses
from paceline.central.messages.settings import Settings
from paceline.central.server.server import Server
from paceline.cli import main
from paceline.errors import PacelineError

TOKEN = "a token that nobody can guess"

Said = Callable[..., str]


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


@pytest.fixture
def server(tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server in this process with one container, in a folder with its token."""
    monkeypatch.chdir(tmp_path)
    Path("token").write_text(TOKEN)
    Path("token").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener, token=TOKEN, say=lambda _: None)
        thread = threading.Thread(target=server.run)
        thread.start()
        with contextlib.closing(made(server, "digits", model)):
            yield server
        server.stop()
        thread.join()
        server.close()


def made(server: Server, name: str, model: nn.Module) -> Client:
    optimizer = torch.optim.Adam(model.parameters())
    return Client(
        model, optimizer, ServerAddresses([server.address], name, TOKEN), Settings(replicas=1), replica=0, incarnation=1
    )


@pytest.fixture
def said(server: Server, capfd: pytest.CaptureFixture[str]) -> Said:
    """What a command prints; of one that fails the sentence."""

    def run(*arguments: str, code: int = 0, let_in: tuple[str, ...] = ("--token", ".")) -> str:
        try:
            found: object = main(["container", *arguments, "--at", server.address, *let_in])
        except SystemExit as exit:
            found = exit.code
        out, err = capfd.readouterr()
        assert found == code, err
        if code:
            assert out == ""
            assert err.startswith("paceline: ")
            assert err.count("\n") == 1
            return err.removeprefix("paceline: ").rstrip("\n")
        assert err == ""
        return out

    return run


def test_list_is_a_line_a_container(said: Said, server: Server) -> None:
    with contextlib.closing(made(server, "another", nn.Linear(500, 500))):
        lines = [line.split() for line in said("list").splitlines()]
        assert lines[0] == ["name", "step", "size", "tensors", "optimizer", "runs", "replicas", "rule", "loss"]
        assert lines[1] == ["another", "0", "1.0", "MB", "2", "Adam", "1", "1", "sync", "-"]
        assert lines[2] == ["digits", "0", "448", "B", "6", "Adam", "1", "1", "sync", "-"]
        assert [listed["name"] for listed in json.loads(said("list", "--json"))] == ["another", "digits"]


def test_show_tells_what_is_where(said: Said, server: Server) -> None:
    shown = said("show", "digits")
    assert "digits: step 0, Adam, 448 B" in shown
    assert "replicas  0" in shown
    assert f"server 0  {server.address}  448 B" in shown
    assert any(line.split() == ["0.weight", "8", "x", "4", "float32", "trained", "0"] for line in shown.splitlines())
    assert "1.running_mean" in shown
    plain = json.loads(said("show", "digits", "--json"))
    assert (plain["rule"], plain["accepting"], plain["late"], plain["staleness"]) == ("sync", 1, 0, {})
    assert [tensor["name"] for tensor in plain["tensors"] if not tensor["trained"]] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]


def test_a_saved_file_is_the_model(said: Said, model: nn.Module) -> None:
    assert said("save", "digits", "saved.safetensors").startswith("digits after step 0 is in saved.safetensors, ")
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    other.load_state_dict(load_file("saved.safetensors"))
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)
    saved = json.loads(said("save", "digits", "saved.safetensors", "--json"))  # replaces the file
    assert (saved["step"], saved["bytes"]) == (0, Path("saved.safetensors").stat().st_size)
    assert sorted(path.name for path in Path().iterdir()) == ["saved.safetensors", "token"]


def test_copy_and_drop(said: Said, server: Server) -> None:
    assert said("copy", "digits", "fork") == "digits was copied to fork\n"
    assert json.loads(said("drop", "fork", "--json")) == {"container": "fork", "dropped": True}
    assert said("drop", "digits", code=2).startswith("container 'digits' is being trained, replicas 0: end that run")
    assert said("drop", "digits", "--force") == "digits was dropped\n"
    assert said("list") == "no container\n"
    with pytest.raises(PacelineError):
        server.container("digits")


def test_what_cannot_be_done_is_said_in_one_sentence(said: Said, server: Server) -> None:
    assert said("lst", code=2) == "action is 'lst': did you mean list?"
    assert said("show", code=2) == "show is '': give paceline container show NAME"
    assert said("copy", "digits", code=2) == "copy is 'digits': give paceline container copy NAME NEW"
    assert said("show", "digts", code=2) == "container 'digts' does not exist on this server: there is digits"
    assert said("copy", "digits", "a/b", code=2).startswith("container is 'a/b': give up to 100 letters without /")
    assert said("copy", "digits", "digits", code=2).startswith("container 'digits' is there already")
    assert said("save", "digits", "no/x", code=2) == "path is 'no/x': its folder does not exist, make it first"
    assert said("save", "digits", ".", code=2).startswith("path is '.': this is a folder")
    assert said("list", code=2, let_in=()).startswith(f"at is '{server.address}': say how to be let in, --token")
    assert said("list", code=2, let_in=("--token", "none")) == "there is no token in none"
    assert said("list", code=2, let_in=("--keys", "none")).startswith("there is no folder none with keys")
    Path("wrong").mkdir()
    Path("wrong/token").write_text("another token of somebody")
    Path("wrong/token").chmod(0o600)
    assert "the token is not this server's" in said("list", code=2, let_in=("--token", "wrong"))
    assert main(["container", "list", "--at", "10.0.0.1:7070", "--token", "."]) == 2
    assert main(["container", "list", "--at", "localhost", "--token", "."]) == 2


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["container", "--help"])
    out = capsys.readouterr().out
    for word in ("list", "show", "save", "drop", "copy", "--at", "--token", "--keys", "examples:"):
        assert word in out
