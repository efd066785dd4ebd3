"""The command line: what is refused before anything starts, and what a plan is made of."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main

MAIN = "import sys; from paceline.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('ran')")
    Path("folder").mkdir()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which the command line refuses, after which nothing was started."""
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
    assert not Path("runs").exists()
    return err.removeprefix("paceline: ").rstrip("\n")


SENTENCES = {
    "rnu train.py": "there is no subcommand rnu: did you mean paceline run?",
    "train.py": "there is no subcommand train.py: did you mean paceline run train.py?",
    "dance": "there is no subcommand dance: give one of",
    "run": "SCRIPT is missing: paceline run --help shows how",
    "run trian.py": "script is 'trian.py': there is no such file, did you mean train.py?",
    "run ./no/train.py": "script is './no/train.py': there is no such file, give the path of a Python file",
    "run folder": "script is 'folder': this is a folder, give the Python file",
    "run train.py --replcas 2": "there is no flag --replcas: did you mean --replicas?",
    "run train.py --lr 0.1": "there is no flag --lr: the script's own arguments go after a lone --",
    "run train.py 0.1": "0.1 is one argument too many: the script's own go after a lone --",
    "run train.py --repl 2": "there is no flag --repl: did you mean --replicas?",
    "run train.py --wire": "--wire needs a value",
    "run train.py --replicas 0": "replicas is '0': give a whole number from 1 up",
    "run train.py --replicas 2.5": "replicas is '2.5': give a whole number from 1 up",
    "run train.py --replicas ٣": "replicas is '٣': give a whole number from 1 up",
    "run train.py --replicas 5000": "replicas is 5000: give at most 2031 a host",
    "run train.py --replicas 3 --nproc-per-node 2": (
        "nproc-per-node is 2: on 1 host(s) that makes 2 but --replicas says 3, give only one"
    ),
    "run train.py --wire bf61": "wire is 'bf61': give one of fp32, bf16, fp16, int8, topk:SHARE",
    "run train.py --batchnorm global": "batchnorm is 'global': give one of local, exact",
    "run train.py --exchange mpi": "exchange is 'mpi': give one of auto, shared, collective",
    "run train.py --timeout never": "timeout is 'never': give a number of seconds above 0",
    "run train.py --timeout inf": "timeout is 'inf': give a number of seconds above 0",
    "run train.py --on-failure retry": "on-failure is 'retry': give one of restart, continue, stop",
    "run train.py --max-restarts -1": "max-restarts is '-1': give a whole number from 0 up",
    "run train.py --save-on-stop no/last.safetensors": (
        "save-on-stop is 'no/last.safetensors': its folder does not exist, make it first"
    ),
    "run train.py --run-folder train.py": ("run-folder is 'train.py': it cannot be made (File exists), give another"),
    "compare train.py --until loss<1 --strategies one,mirrored --emulate hosts=2:3,link=1gbit": (
        "emulate's hosts is '2:3': give a whole number from 2 to 64"
    ),
    "run train.py --nnodes 2": "nnodes is 2: give every host its number, --node-rank 0 to 1",
    "run train.py --nnodes 2 --node-rank 1": "nnodes is 2: say where host 0 is, --rdzv-endpoint 10.0.0.1:29500",
    "run train.py --nnodes 2 --node-rank 2 --rdzv-endpoint a:1": (
        "node-rank is 2: give a number below --nnodes, which is 2"
    ),
    "run train.py --nnodes 2 --node-rank 1 --rdzv-endpoint a:b": (
        "rdzv-endpoint is 'a:b': give address:port, such as 10.0.0.1:29500"
    ),
    "run train.py --rdzv-endpoint a:1 --master-addr b": ("master-addr is 'b': --rdzv-endpoint says a:1, give only one"),
    "run train.py --nnodes 2 --replicas 3": ("replicas is 3: give a multiple of 2, as many to each of the 2 hosts"),
    "run train.py --nnodes 2 --on-failure restart": (
        "on-failure is 'restart': mirrored replicas of several hosts are not started again so far"
    ),
    "run train.py --secure --servers 1": "secure is 'set': nothing leaves this host, leave it out, or give --nnodes",
    "run train.py --emulate hosts=2,link=1gbit --secure": (
        "secure is 'set': gradients of mirrored replicas travel by torch.distributed, which has no TLS"
    ),
    "run train.py --nnodes 2 --secure --servers 1": (
        "secure is 'set': its keys are made of a secret that every host has, give it with --token"
    ),
    "run train.py --nnodes 2 --servers 1 --keys keys --secure": (
        "secure is 'set': these --keys are used, and it would make others, give only one"
    ),
    "run train.py --nnodes 2 --every 8 --on-failure continue": (
        "on-failure is 'continue': between several hosts no death is survived with --every, where each host has steps"
    ),
    "run train.py --replicas 2 --exchange collective --on-failure restart": (
        "on-failure is 'restart': replicas that use collectives survive no death: give stop"
    ),
    "run train.py --replicas 2 --exchange collective --on-failure continue": (
        "on-failure is 'continue': replicas that use collectives survive no death: give stop"
    ),
    "run train.py --nnodes 2 --servers 2": "servers is 2: say how servers tell friends from strangers, --token with a",
    "run train.py --nnodes 2 --servers 2 --only sparse": "nnodes is 2: tables on servers work on one host so far",
    "run train.py --emulate hosts=2,link=1gbit --servers 2 --servers-on 0,2": (
        "servers-on is '0,2': '2' is no host, give numbers from 0 to 1"
    ),
    "run train.py --emulate hosts=2,link=1gbit --servers 1 --servers-on 0,1": (
        "servers-on is '0,1': that is 2 hosts for 1 server(s), name at most as many"
    ),
    "run train.py --emulate hosts=2,link=1gbit --servers 2 --servers-on 1,1": (
        "servers-on is '1,1': a host is there twice, give each once"
    ),
    "run train.py --servers 2 --servers-on 0": (
        "servers-on is '0': it is about servers that are started on several hosts, leave it out"
    ),
    "run train.py --nnodes 2 --servers 2 --token secret --keys keys": (
        "token is 'secret': certificates tell who comes, give only one of --token, --keys"
    ),
    "run train.py --token secret": (
        "token is 'secret': it belongs to servers that run already, or to servers of a run on several hosts"
    ),
    "run train.py --emulate hosts=2,link=1gbit --join 127.0.0.1:7070 --token folder --container a": (
        "emulate is 'hosts=2,link=1gbit': emulated hosts reach no server outside, leave out --join"
    ),
    "run train.py --emulate hosts=2,link=1gbit --replicas 3 --stages 2": (
        "replicas is 3: give a multiple of 2, as many to each of the 2 hosts"
    ),
    "run train.py --emulate hosts=2,link=1gbit --replicas 1": (
        "replicas is 1: give a multiple of 2, as many to each of the 2 hosts"
    ),
    "run train.py --emulate hosts=2,link=1gbit --replicas 1 --tiles 2": (
        "replicas is 1: tiles 2x1 on several hosts would exchange too much, only --stages can be there"
    ),
    "run train.py --emulate hosts=2,link=1gbit --replicas 1 --stages 3": (
        "stages is 3: one replica on 2 hosts has as many stages on each, give a multiple of 2"
    ),
    "run train.py --emulate hosts=2,link=1gbit --replicas 1 --stages 2 --wire bf16": (
        "wire is 'bf16': between stages activations go as they are, and gradients stay, give fp32"
    ),
    "run train.py --emulate hosts=2,link=1gbit --mesh data=3,model=2 --layout batch=data,hidden=model": (
        "replicas is 3: give a multiple of 2, as many to each of the 2 hosts"
    ),
    "run train.py --emulate hosts=2,link=1gbit --replicas 2 --stages 2 --servers 1": (
        "emulate is 'hosts=2,link=1gbit': a cut model with servers works on one host so far"
    ),
    "run train.py --emulate hosts=2,link=1gbit --async": "async is 'set': it needs servers, give --servers 1 or more",
    "run train.py --emulate hosts=2,link=1gbit --durability log": "durability is 'log': it needs servers",
    "run train.py --nnodes 10000000000 --node-rank 0 --rdzv-endpoint localhost:1": (
        "nnodes is 10000000000: give at most 1024"
    ),
    "run train.py --nnodes 2 --node-rank 1 --rdzv-endpoint no-such-host.invalid:1": (
        "rdzv-endpoint is 'no-such-host.invalid:1': its host cannot be found"
    ),
    "run train.py --nnodes 2 --node-rank 1 --rdzv-endpoint a:²": (
        "rdzv-endpoint is 'a:²': give address:port, such as 10.0.0.1:29500"
    ),
    "run train.py --nnodes 2 --node-rank 1 --master-port 29511": (
        "master-port is 29511: say where host 0 is, --master-addr 10.0.0.1"
    ),
    "run train.py --replicas 2 --every 8": (
        "every is 8: replicas of one host share memory and send nothing, it is for several hosts, leave it out"
    ),
    "run train.py --emulate hosts=2,link=1gbit --servers 1 --every 8": (
        "every is 8: with servers replicas push at each step, leave it out"
    ),
    "run train.py --emulate hosts=2,link=1gbit --replicas 2 --stages 2 --every 8": (
        "every is 8: hosts exchange the gradients of a cut model at each step so far"
    ),
    "run train.py --servers 1 --batchnorm exact": "batchnorm is 'exact': with servers statistics are local, leave it",
    "run train.py --servers 1 --async --accept 1": (
        "accept is '1': it belongs to sync updates, leave out --async and --bounded"
    ),
    "run train.py --servers 1 --stale scale": "stale is 'scale': gradients are stale with --async only, add it",
    "run train.py --servers 5000": "servers is 5000: give at most 1024",
    "run train.py --servers 1024": "servers is 1024: torch alone takes",
    "run train.py --servers 2 --accept ²": "accept is '²': give a number of replicas, or auto",
    "run train.py --join 127.0.0.1:² --token folder": "join is '127.0.0.1:²': give addresses with ports",
    "run train.py --save-on-stop folder": "save-on-stop is 'folder': this is a folder, give the name of a file in it",
    "run train.py --save-on-stop last.pt": "save-on-stop is 'last.pt': give a file name that ends in .safetensors",
    "run train.py --save-on-stop a.previous.safetensors": (
        "save-on-stop is 'a.previous.safetensors': give another name, this one is for files beside a checkpoint"
    ),
    "run train.py --run-folder ": "run-folder is '': give the name of a folder, or leave it out",
    f"run {'s' * 5000}": "script is 'ssss",
    f"run train.py --replicas {'9' * 5000}": "replicas is '9999",
    "run train.py --no-checkpoints --save-on-stop last.safetensors": (
        "no-checkpoints is 'set': --save-on-stop writes one, give only one of them"
    ),
    "run train.py --stages 2 --cut-at ": "cut-at is '': give names of modules, such as blocks.2,blocks.4",
    "verify train.py --replicas 100000": "replicas is 100000: give at most 2031 a host",
    "verify train.py --replicas 2000": "replicas is 2000: torch alone takes",
    "run train.py --emulate hosts=2": "emulate is 'hosts=2': link is missing, write it as hosts=2,link=1gbit",
    "run train.py --emulate hosts=2,link=1gbit --nnodes 2": (
        "emulate is 'hosts=2,link=1gbit': it sets hosts itself, leave its flag out"
    ),
}


LONG = "a" * 5000
ODD = [
    *(["server", "--dir", "d", *odd] for odd in (["--token", LONG], ["--keys", LONG], ["--listen", "127.0.0.1:²"])),
    ["server", "--dir", "d", "--listen", f"127.0.0.1:{'9' * 5000}"],
    *(["server", "--dir", odd] for odd in ("", LONG)),
    ["keys", "make", LONG, "--name", "x"],
    ["keys", "show", LONG],
    *(["container", "list", "--at", "127.0.0.1:1", odd, LONG] for odd in ("--token", "--keys")),
    ["container", "save", "a", LONG, "--at", "127.0.0.1:1", "--token", "folder"],
    ["dims", LONG],
    *(["run", "train.py", "--join", "127.0.0.1:1", odd, LONG] for odd in ("--token", "--keys", "--container")),
    *(["run", "train.py", "--save-on-stop", odd] for odd in ("/proc/x.safetensors", f"{LONG}.safetensors")),
    ["run", "train.py", "--run-folder", LONG],
    ["run", "-m", LONG],
    ["run", "-m", "..x"],
    ["run", "tr\udcffain.py"],
    ["run", "train.py", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", f"{LONG}:1"],
]


@pytest.mark.parametrize("words", ODD, ids=[f"{words[0]}-{n}" for n, words in enumerate(ODD)])
def test_a_value_that_no_system_call_would_take_is_answered_with_a_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, *words)


@pytest.mark.parametrize("line", SENTENCES)
def test_bad_input_is_refused_in_one_sentence_that_says_what_would_be_right(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *line.split(" ")).startswith(SENTENCES[line])


def test_a_port_in_use_is_named_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        host = ["run", "train.py", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        sentence = refused(capsys, *host, "--node-rank", "0")
    assert sentence == f"rdzv-endpoint is '127.0.0.1:{port}': port {port} is in use on this host, give another"


@pytest.mark.skipif(os.geteuid() != 0, reason="root may read everything, and become somebody else")
def test_emulation_without_permission_is_refused_before_anything_starts(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    as_nobody = "import os, sys, paceline.cli.run; os.setuid(65534); sys.exit(paceline.cli.main())"
    flags = ["--replicas", "2", "--emulate", "hosts=2,link=1gbit"]
    done = subprocess.run(
        [sys.executable, "-c", as_nobody, "run", "train.py", *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: --emulate makes network namespaces, which only root may")
    assert not Path("runs").exists()


def test_help_teaches_by_examples_and_comes_without_torch() -> None:
    code = """
import sys
from paceline.cli import main
for arguments in (["--help"], ["--version"], []):
    assert main(arguments) == 0
try:
    main(["run", "--help"])
except SystemExit as exit:
    assert exit.code == 0
assert "torch" not in sys.modules, "import torch takes more than a second"
assert "rich" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "paceline run train.py --replicas 4 -- --lr 0.1" in done.stdout
    assert "--nnodes 2 --nproc-per-node 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500" in done.stdout


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", MAIN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_the_configuration_says_of_each_value_where_it_came_from() -> None:
    done = run("run", "--nproc_per_node=2", "train.py", "--timeout", "30", "--max-restarts", "0", "--", "-x", "a b")
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-train")
    config = json.loads((folder / "config.json").read_text())
    assert config["command"][:3] == ["paceline", "run", "--nproc_per_node=2"]
    assert config["settings"] == {
        "script": {"value": "train.py", "from": "flag"},
        "arguments": {"value": ["-x", "a b"], "from": "flag"},
        "replicas": {"value": 2, "from": "flag"},
        "wire": {"value": "fp32", "from": "default", "not_used": "no gradient crosses a link"},
        "batchnorm": {"value": "exact", "from": "default"},
        "every": {"value": 1, "from": "default", "not_used": "no gradient crosses a link"},
        "outer_lr": {"value": 1.0, "from": "default", "not_used": "hosts make no steps by themselves"},
        "exchange": {"value": "auto", "from": "default"},
        "timeout_s": {"value": 30.0, "from": "flag"},
        "servers_on": {"value": None, "from": "default"},
        "on_failure": {"value": "continue", "from": "default"},
        "max_restarts": {
            "value": 0,
            "from": "flag",
            "not_used": "nothing is started again, --on-failure restart would",
        },
        "save_on_stop": {"value": None, "from": "default"},
        "no_checkpoints": {"value": None, "from": "default"},
        "hosts": {"value": 1, "from": "default"},
        "host": {"value": 0, "from": "default", "not_used": "there is one host"},
        "rendezvous": {"value": None, "from": "default"},
        "emulate": {"value": None, "from": "default"},
        "lost_after_s": {
            "value": 20.0,
            "from": "default",
            "not_used": "supervisors of several hosts do not meet here",
        },
        **{
            name: {"value": None, "from": "default"}
            for name in (
                "until",
                "goes_on",
                "longest_s",
                "most_steps",
                "operation_timeout_s",
                "slow",
                "devices",
                "secure",
            )
        },
    }
    assert set(config["versions"]) == {"python", "torch", "paceline"}
    assert len(config["cores_by_replica"]) == 2
    assert (
        "given: script train.py, arguments -x 'a b', replicas 2, timeout 30 s; by default: on-failure continue, "
        "hosts 1, exchange auto, batchnorm exact; "
        "not used: max-restarts 0 (nothing is started again, --on-failure restart would)\n" in done.stderr
    )


def test_quiet_leaves_the_scripts_output_alone() -> None:
    done = run("run", "train.py", "--quiet")
    assert (done.stdout, done.stderr) == ("ran\n", "")


def test_the_summary_is_the_last_line_on_stdout() -> None:
    done = run("run", "train.py", "--json", "--run-folder", "here")
    first, last = done.stdout.splitlines()
    assert first == "ran"
    assert json.loads(last) | {"seconds": 0} == {
        "run_folder": "here",
        "exit_code": 0,
        "steps": 0,
        "resumed_at": 0,
        "seconds": 0,
        "samples_per_second": 0.0,
        "deaths": 0,
        "restarts": 0,
        "loss": None,
        "samples": 0,
        "found": {},
        "bytes_sent": 0,
        "saved": None,
        "kept": [],
        **dict.fromkeys(("target", "stopped_by", "late", "dropped", "staleness", "thrown_away", "cutting_s")),
    }


def test_one_host_that_uses_collectives_is_given_a_place_to_meet() -> None:
    Path("train.py").write_text("from paceline.run_place import find_place\nprint(find_place().rendezvous)")
    address, port = run("run", "train.py", "--exchange", "collective", "--replicas", "2").stdout.strip().split(":")
    assert address == "127.0.0.1"
    assert 0 < int(port) < 65536
    assert run("run", "train.py", "--replicas", "2").stdout == "None\n"


def test_without_a_word_about_failures_collectives_stop_at_a_death() -> None:
    Path("train.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    ended = run("run", "train.py", "--exchange", "collective", "--replicas", "2", code=137)
    assert "by default: on-failure stop" in ended.stderr
    assert "go on" not in ended.stderr
