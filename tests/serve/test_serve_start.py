"""How `paceline serve` begins and ends: what it refuses before it answers, tokens, TLS, a cut model, draining."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file
from serving import LONG_S, SCRIPT, Served, outputs, save_weight

TOKEN = "a-token-of-some-length"

MAKES_MODEL = """
import sys
import torch

def make_model():
    torch.manual_seed(0)
    width = int(sys.argv[sys.argv.index("--width") + 1])
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))

assert __name__ != "__main__"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_weight(tmp_path / "model.safetensors", 1.0)
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "other.safetensors")
    (tmp_path / "empty.py").write_text("import torch\n")
    (tmp_path / "failing.py").write_text("import torch\nraise OSError('no data here')\n")
    (tmp_path / "wrong.py").write_text("def make_model():\n    return 5\n")
    (tmp_path / "token").write_text("short")
    (tmp_path / "token").chmod(0o600)
    return tmp_path


def refused(folder: Path, *arguments: str) -> str:
    """The sentence with which it does not start."""
    run = subprocess.run(
        [sys.executable, "-m", "paceline", "serve", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    return run.stderr.splitlines()[-1].removeprefix("paceline: ")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--script is missing"),
        (["--script", "nowhere.py"], "script is 'nowhere.py': there is no such file"),
        (["--script", "empty.py", "--port", "x"], "port is 'x': give a number from 0 to 65535"),
        (["--script", "empty.py", "--deadline", "soon"], "deadline is 'soon': give a time such as 1s or 200ms"),
        (["--script", "empty.py", "--max-body", "-1"], "max-body is '-1': give a size such as 64MB"),
        (["--script", "empty.py", "--input", "x"], "input is 'x': give NAME:TYPE:SHAPE"),
        (["--script", "empty.py", "--name", "a/b"], "name is 'a/b'"),
        (["--script", "empty.py", "--token-file", "token"], "token does not hold a token"),
        (["--script", "empty.py", "--tls-cert", "token"], "tls-cert is 'token': it needs --tls-key too"),
        (["--script", "empty.py", "--tls-cert", "token", "--tls-key", "token"], "are no certificate and its key"),
        (["--script", "empty.py", "--stages", "2", "--replicas", "2"], "replicas is 2: a cut model has all cores"),
        (["--script", "empty.py", "--layout", "a=b"], "layout is 'a=b': it belongs to --mesh"),
        (["--script", "empty.py", "--quorum", "2"], "quorum is 2: it is of several models"),
        (["--script", "empty.py", "--weights", "1,2"], "weights is '1,2': it is of several models"),
        (["--script", "empty.py", "--ensemble", "mean"], "give at least two, as in top/*.safetensors"),
        (["--script", "empty.py", "--pad"], "pad is 'no --input': say which dims may be of any size"),
        (["--script", "empty.py", "--pad", "--input", "x:FP32:-1,4"], "pad is 'x [-1, 4]': say which dims"),
        (
            ["--script", "empty.py", "--pad", "--input", "x:FP32:-1,-1", "--max-batch", "1"],
            "pad is 'with --max-batch 1': nothing is put together then",
        ),
        (["--script", "empty.py", "--follow", "127.0.0.1:1:a"], "model is 'model.safetensors': --follow takes it from"),
        (
            ["--script", "empty.py", "--follow-every", "1s"],
            "follow-every is '1s': it is of a training",
        ),
        (["other.safetensors", "--script", "empty.py"], "give one, or say how they answer as one: --ensemble mean"),
        (["nowhere.safetensors", "--script", "empty.py", "--ensemble", "mean"], "there is no such file"),
        *(
            (["other.safetensors", "--script", "empty.py", "--ensemble", how, *more], sentence)
            for how, more, sentence in [
                ("median", [], "ensemble is 'median': give one of mean, majority, weighted, stacked"),
                ("mean", ["--quorum", "3"], "quorum is 3: give a whole number from 1 to 2"),
                ("mean", ["--weights", "1,1"], "they are of --ensemble weighted and stacked"),
                ("mean", ["--outputs", "colours"], "outputs is 'colours': give one of logits"),
                ("mean", ["--outputs", "labels"], "labels can be combined by majority"),
                ("mean", ["--class-dim", "0"], "class-dim is 0: that is the dim of rows"),
                ("mean", ["--stages", "2"], "ensemble is 'mean': members have a process each"),
                ("weighted", [], "it needs --weights, which paceline ensemble --combine weighted finds"),
                ("weighted", ["--weights", "a"], "weights is 'a': give numbers with commas"),
                ("weighted", ["--weights", "1"], "give one for each of the 2 members"),
                ("stacked", ["--weights", "1,1", "--quorum", "1"], "stacked weights belong together, give 2"),
            ]
        ),
    ],
)
def test_a_flag_that_is_wrong_is_refused_before_anything_starts(
    folder: Path, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.cli import main

    monkeypatch.chdir(folder)
    try:
        code = main(["serve", "model.safetensors", *flags])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "model is '': give a .safetensors file, or a training to --follow"),
        (["--follow", "here"], "follow is 'here': give servers and a container, as in 127.0.0.1:7070:digits"),
        (["--follow", "127.0.0.1:7070"], "give servers and a container"),
        (["--follow", "127.0.0.1:7070:digits"], "say how to be let in: --follow-token or --follow-keys"),
        (["--follow", "10.0.0.9:7070:digits", "--follow-token", "."], "beyond this machine give --follow-keys"),
        (["--follow", "127.0.0.1:7070:digits", "--follow-token", "nowhere"], "nowhere"),
        (["--follow", "127.0.0.1:7070:digits", "--ensemble", "mean", "--follow-token", "token"], "token"),
        (["--follow", "127.0.0.1:7070:a/b", "--follow-token", "token"], "a/b"),
    ],
)
def test_a_training_that_cannot_be_followed_is_refused_before_anything_starts(
    folder: Path, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.cli import main

    monkeypatch.chdir(folder)
    assert main(["serve", "--script", "empty.py", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_what_the_script_and_the_checkpoint_lack_is_said_in_a_sentence(folder: Path) -> None:
    ended = "empty.py ended and no model was found: let it call trainer.step, or define make_model()"
    assert refused(folder, "model.safetensors", "--script", "empty.py", "--port", "0") == ended
    unlike = "other.safetensors has no tensor 'weight', unlike the model: give the model it is of"
    assert refused(folder, "other.safetensors", "--script", str(SCRIPT), "--port", "0") == unlike
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(folder, "model.safetensors", "--script", str(SCRIPT), "--port", str(port))
        assert said == f"port is {port}: it is in use on 127.0.0.1, give another, or 0 for any that is free"


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("failing.py", "failing.py failed before its model was found: OSError: no data here"),
        ("wrong.py", "wrong.py: make_model() returned a int, let it return the nn.Module"),
        ("token", "token is no Python file|token failed before its model was found: NameError"),
    ],
)
def test_a_script_without_a_model_is_told_from_one_that_fails(
    folder: Path, script: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.errors import LaunchError
    from paceline.serve.script_model import find_model

    monkeypatch.chdir(folder)
    monkeypatch.setenv("PACELINE_PLACE", "")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(LaunchError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        find_model(script, [], with_call=True)


def certificate(folder: Path) -> tuple[Path, Path]:
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert, private = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, plain))
    return cert, private


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With a token, TLS, two processes and a log; of a script that only makes a model, whose inputs are told."""
    folder = tmp_path_factory.mktemp("guarded")
    cert, key = certificate(folder)
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    script = folder / "net.py"
    script.write_text(MAKES_MODEL)
    rng = np.random.default_rng(0)
    shapes = {"0.weight": (5, 4), "0.bias": (5,), "2.weight": (3, 5), "2.bias": (3,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "net.safetensors")
    flags = ["--token-file", str(token), "--tls-cert", str(cert), "--tls-key", str(key), "--replicas", "2"]
    flags += ["--access-log", str(folder / "log"), "--input", "input:FP32:-1,4", "--name", "net", "--", "--width", "5"]
    served = Served(folder, *flags, script=script, checkpoint=folder / "net.safetensors")
    yield served
    assert served.end() == 0, served.said


def test_only_who_has_the_token_may_ask_and_every_request_is_logged(guarded: Served) -> None:
    context = ssl.create_default_context(cafile=str(guarded.folder / "cert.pem"))
    address = guarded.told["address"].replace("127.0.0.1", "localhost")
    assert address.startswith("https://")
    with httpx.Client(base_url=address, verify=context, timeout=LONG_S) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            for method, path in (("GET", "/v2"), ("POST", "/predict"), ("GET", "/metrics"), ("GET", "/openapi.json")):
                answer = client.request(method, path, headers=headers)
                assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert client.get("/v2/health/ready").status_code == 200
        assert TOKEN not in client.get("/").text
        answer = client.post("/predict", json=[1, 2, 3, 4], headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200
        assert len(answer.json()["outputs"]["output"]) == 3
    log = guarded.folder / "log"
    guarded.wait_for(lambda: log.read_text().count("\n") == 15)  # a request is answered first, and then logged
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["status"] for line in lines] == [401] * 12 + [200] * 3
    assert (lines[-1]["method"], lines[-1]["path"], lines[-1]["bytes"]) == ("POST", "/predict", len(answer.content))
    assert len(guarded.told["processes"]) == 2


def test_a_server_that_is_told_to_end_answers_what_it_has_taken(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        processes = psutil.Process(served.told["process"]).children(recursive=True)
        assert len(processes) == 2  # the template, and the one that answers
        served.hold()
        with ThreadPoolExecutor(4) as pool:
            held = pool.submit(served.ask, [555.0, 1, 1, 1])
            served.wait_for(lambda: served.metric("paceline_batch_rows_count") == 1)
            behind = pool.submit(served.ask, [1.0, 1, 1, 1])
            served.wait_for(lambda: served.metric("paceline_queue_depth") == 1)
            served.process.send_signal(signal.SIGTERM)

            def closed() -> bool:
                try:
                    socket.create_connection(("127.0.0.1", served.told["port"])).close()
                except ConnectionRefusedError:
                    return True
                return False

            served.wait_for(closed)
            served.release()
            assert outputs(held.result(LONG_S))["total"] == [558.0]
            assert outputs(behind.result(LONG_S))["total"] == [4.0]
        assert served.end() == 0, served.said
        assert not psutil.wait_procs(processes, timeout=LONG_S)[1]


def test_everything_ends_with_a_server_that_is_killed_while_a_process_computes(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        processes = psutil.Process(served.told["process"]).children(recursive=True)
        served.hold()
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(served.ask, [555.0, 1, 1, 1])
            served.wait_for(lambda: served.metric("paceline_batch_rows_count") == 1)
            served.process.kill()
            assert isinstance(held.exception(LONG_S), httpx.HTTPError)
        assert not psutil.wait_procs(processes, timeout=LONG_S)[1]
        assert served.end() == -signal.SIGKILL


CUT = """
import torch
import paceline as pl

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))

torch.manual_seed(0)
model = Mlp()
dims = {"fc1.weight": "hidden features", "fc2.weight": "classes hidden"}
loss = lambda model, batch: model(batch).pow(2).mean()
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, dims=dims)
for batch in trainer.batches(torch.ones(8, 6), batch_size=4):
    trainer.step(batch)
"""


def test_a_cut_model_gives_the_answers_of_the_whole_one_also_after_a_device_was_killed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"fc1.weight": (8, 6), "fc1.bias": (8,), "fc2.weight": (3, 8), "fc2.bias": (3,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "mlp.safetensors")
    (tmp_path / "cut.py").write_text(CUT)
    cut = ["--mesh", "model=2", "--layout", "hidden=model", "--deadline", "60s"]
    with Served(tmp_path, *cut, script=tmp_path / "cut.py", checkpoint=tmp_path / "mlp.safetensors") as served:
        x = rng.normal(size=(1, 6)).astype(np.float32)
        hidden = np.maximum(x @ weights["fc1.weight"].T + weights["fc1.bias"], 0)
        expected = hidden @ weights["fc2.weight"].T + weights["fc2.bias"]

        def answer(rows: np.ndarray) -> np.ndarray:
            response = served.client.post("/predict", json=rows.tolist())
            assert response.status_code == 200, response.text
            return np.array(response.json()["outputs"]["output"])

        np.testing.assert_allclose(answer(x), expected, rtol=1e-5)
        np.testing.assert_allclose(answer(np.repeat(x, 3, 0)), np.repeat(expected, 3, 0), rtol=1e-5)
        (model,) = served.told["processes"].values()
        (device,) = psutil.Process(model).children()
        device.kill()
        first = served.client.post("/predict", json=x.tolist())
        assert first.status_code in (200, 422, 503)
        served.wait_for(lambda: served.client.post("/predict", json=x.tolist()).status_code == 200)
        np.testing.assert_allclose(answer(x), expected, rtol=1e-5)
        assert served.end() == 0, served.said
        assert not psutil.pid_exists(model)


def test_help_comes_without_torch() -> None:
    code = "import sys; from paceline.cli import main; main(['serve', '--help']); sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert run.returncode == 0
    assert "paceline serve model.safetensors --script train.py" in run.stdout
