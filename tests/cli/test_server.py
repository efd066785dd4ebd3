"""`paceline server` and `--join`: a server that outlives its runs, and what is refused before anything is started."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MAIN, Start

from paceline.central.client.reader import Reader
from paceline.cli import main
from paceline.net.secure import read_token

TRAIN = """
import argparse, json, torch, torch.nn.functional as F, paceline as pl
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--width", type=int, default=30)
options = parser.parse_args()
torch.manual_seed(0)
width = options.width
model = torch.nn.Sequential(torch.nn.Linear(10, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
x = torch.randn(60, 10, generator=torch.Generator().manual_seed(1))
loss = lambda model, batch: F.mse_loss(model(batch), batch.sum(1, keepdim=True))
trainer = pl.Trainer(model, torch.optim.Adam(model.parameters(), lr=0.01), loss)
for batch in trainer.batches(x, 20, epochs=options.epochs, seed=2):
    trainer.step(batch)
total = sum(p.double().sum().item() for p in model.parameters())
print(json.dumps({"sum": total, "steps": trainer.steps, "mean": trainer.evaluate(x, loss)}))
"""


class ServerProcess:
    """A `paceline server` of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-c", MAIN, "server", "--dir", str(folder), "--listen", "127.0.0.1:0", "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.folder = folder
        self.process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.said = json.loads(self.process.stdout.readline())
        self.address = str(self.said["address"])

    def end(self, number: signal.Signals) -> list[dict[str, object]]:
        """What it held."""
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        held: list[dict[str, object]] = json.loads(out)["held"]
        return held


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two that have one token."""
    folder = tmp_path_factory.mktemp("servers")
    first = ServerProcess(folder / "0")
    second = ServerProcess(folder / "1", "--token", str(folder / "0"))
    yield [first, second]
    for server in (first, second):
        if server.process.poll() is None:
            server.end(signal.SIGTERM)


def join(servers: list[ServerProcess]) -> str:
    return f"--join {','.join(server.address for server in servers)} --token {shlex.quote(str(servers[0].folder))}"


@pytest.mark.soak
def test_a_run_goes_on_in_a_container_that_another_has_left(start: Start, servers: list[ServerProcess]) -> None:
    whole = start(TRAIN, "--replicas 2 --servers 2", "--epochs 4").fine()
    first = start(TRAIN, f"--replicas 2 {join(servers)} --container halves", "--epochs 2").fine()
    assert first.told("steps") == 6
    second = start(TRAIN, f"--replicas 1 {join(servers)} --container halves", "--epochs 4").fine()
    assert second.told("steps") == whole.told("steps") == 12
    assert second.told("sum") == pytest.approx(whole.told("sum"), rel=1e-6)
    again = start(TRAIN, f"--replicas 1 {join(servers)} --container halves", "--epochs 4").fine()
    assert (again.told("sum"), again.told("mean")) == (second.told("sum"), second.told("mean"))  # all was done
    token = read_token(servers[0].folder)
    with Reader([servers[1].address], "halves", token=token) as reader:
        step, tensors = reader.parameters()
    assert step == 12
    assert sum(tensor.double().sum().item() for tensor in tensors.values()) == pytest.approx(second.told("sum"))


@pytest.mark.soak
def test_what_a_joining_run_is_told(start: Start, servers: list[ServerProcess], tmp_path: Path) -> None:
    start(TRAIN, f"{join(servers)} --container shape", "--epochs 1").fine()
    other = start(TRAIN, f"{join(servers)} --container shape", "--epochs 1 --width 7").end()
    assert other.code != 0
    assert "container 'shape' holds another model: 0.weight of shape (7, 10) is 0.weight of shape (30, 10)" in other.err
    fewer = start(TRAIN, f"{join(servers[:1])} --container shape", "--epochs 1").end()
    assert "container 'shape' is spread over 2 servers and not over 1: give 127.0.0.1:" in fewer.err
    (tmp_path / "mine.txt").write_text("the token of somebody else")
    (tmp_path / "mine.txt").chmod(0o600)
    stranger = start(TRAIN, f"--join {servers[0].address} --token {tmp_path}/mine.txt", "--epochs 1").end()
    assert "the token is not this server's" in stranger.sentence
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"127.0.0.1:{listener.getsockname()[1]}"
    unreached = start(TRAIN, f"--join {nobody} --token {servers[0].folder}", "--epochs 1").end(60)
    assert f"waited 5 s for server 0 at {nobody}: it cannot be reached (Connection refused)" in unreached.sentence
    assert 0 not in (fewer.code, stranger.code, unreached.code)


def test_it_ends_when_it_is_told_to_and_keeps_its_token(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "server"
    first = ServerProcess(folder)
    token = read_token(folder)
    assert first.said["token"] == str(folder / "token")
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert first.end(signal.SIGINT) == []
    again = ServerProcess(folder)
    assert read_token(folder) == token
    assert main(["server", "--dir", str(folder), "--listen", "127.0.0.1:0"]) == 2  # it is in use
    assert again.end(signal.SIGTERM) == []


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('ran')")
    Path("held").mkdir()
    Path("held/token").write_text("a token that nobody can guess")
    Path("held/token").chmod(0o600)


RUN = "run train.py --join 127.0.0.1:7070"
SENTENCES = {
    "server": "--dir is missing: paceline server --help shows how",
    "server --dir s --listen 7070": "listen is '7070': give address:port, such as 127.0.0.1:7070",
    "server --dir s --listen 127.0.0.1:99999": "listen is '127.0.0.1:99999': give address:port, such as 127.0.0.1:7070",
    "server --dir s --listen 0.0.0.0:7070": (
        "listen is '0.0.0.0:7070': beyond this machine give --keys FOLDER, which paceline keys make makes"
    ),
    "server --dir s --keys none": "there is no folder none with keys: paceline keys make none makes one",
    "server --dir train.py": "dir is 'train.py': it cannot be written (File exists), give another",
    "server --dir s --listen 127.0.0.1:0 --token none": "there is no token in none",
    "run train.py --join 7070 --token held": (
        "join is '7070': give addresses with ports, such as 127.0.0.1:7070,127.0.0.1:7071"
    ),
    "run train.py --join 127.0.0.1:1,127.0.0.1:1 --token held": (
        "join is '127.0.0.1:1,127.0.0.1:1': an address is there twice, give every server once"
    ),
    RUN: "join is '127.0.0.1:7070': say how to be let in, --token with the servers' folder, or --keys with keys",
    f"{RUN} --token none": "there is no token in none",
    f"{RUN} --token held --servers 2": "servers is 2: --join uses servers that run already, leave it out",
    f"{RUN} --token held --container a/b": (
        "container is 'a/b': give up to 100 letters without /, the first of them not a dot"
    ),
    f"{RUN} --keys none": "there is no folder none with keys: paceline keys make none makes one",
    "run train.py --join 10.0.0.1:7070 --token held": (
        "join is '10.0.0.1:7070': beyond this machine give --keys, made by paceline keys make"
    ),
    "run train.py --container x": ("container is 'x': it belongs to servers that run already, give --join ADDRESSES"),
    "run train.py --servers 1 --token held": (
        "token is 'held': it belongs to servers that run already, or to servers of a run on several hosts, give --join "
        "ADDRESSES"
    ),
}


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("command", SENTENCES)
def test_what_is_wrong_is_said_in_one_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(shlex.split(command))
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    assert (code, out, err) == (2, "", f"paceline: {SENTENCES[command]}\n")
    assert not Path("runs").exists()


@pytest.mark.usefixtures("_folder")
def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listen = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main(["server", "--dir", "s", "--listen", listen]) == 2
    assert f"listen is '{listen}': Address already in use, give another" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["server", "--help"])
    out = capsys.readouterr().out
    for word in ("--dir", "--listen", "--token", "--keys", "--join", "paceline container list", "examples:"):
        assert word in out
