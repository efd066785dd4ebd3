"""`paceline serve`: a trained model behind a port."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from paceline.cli import is_count, whole
from paceline.cli.checks import check_script
from paceline.cli.cut import CUT_FLAGS, add_cut_arguments, read_split
from paceline.errors import InvalidInput, LaunchError, StrategyError
from paceline.launch.cores import allowed_cores
from paceline.net.secure import is_loopback, read_token

MOST_DEVICES_A_CORE = 4
MOST_DEADLINE_S = 3600.0
_NEEDED = ("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}

EXAMPLES = """\
examples:
  paceline serve model.safetensors --script train.py
  paceline serve model.safetensors --script train.py --replicas 2 --max-batch 64 --deadline 200ms
  paceline serve model.safetensors --script train.py --mesh model=2 --layout hidden=model
  paceline serve model.safetensors --script net.py --input x:FP32:-1,3,224,224 -- --width 512

  curl localhost:8000/predict -d '[0.1, 0.2, 0.3]'
  curl localhost:8000/v2/models/model/infer -d '{"inputs": [{"name": "input", "shape": [1, 3], "datatype": "FP32",
    "data": [0.1, 0.2, 0.3]}]}'

The script is run, and nothing is trained, to get at its model: one that defines make_model() is imported and that is
called; any other runs until its first batch reaches trainer.step, which tells what the model takes. With --input it
ends at its pl.Trainer already, and needs no data.

A new checkpoint in the place of the old one is served as a new version, without a failed request; so does SIGHUP, and
POST /v2/repository/models/NAME/load. SIGTERM ends the server when it has answered what it has taken.
http://localhost:8000/ is a page to try the model, /docs shows what can be asked, /metrics is for Prometheus.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline serve MODEL --script SCRIPT [options] [-- the script's own arguments]"
    parser.description = "Answer requests with a trained model, over HTTP (Open Inference Protocol v2, and JSON)."
    parser.epilog = EXAMPLES
    parser.add_argument("checkpoint", metavar="MODEL", help="a .safetensors file, as trainer.save writes it")
    parser.add_argument("--script", required=True, metavar="SCRIPT", help="the Python file that makes the model")
    parser.add_argument("--name", help="of the model in addresses, default the file's without its ending")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME:TYPE:SHAPE",
        help="what the model takes, such as x:FP32:-1,64; default what the script's first batch says",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--host", default="127.0.0.1", help="address to answer at, default 127.0.0.1")
    where.add_argument("--port", default="8000", help="default 8000; 0: any that is free")
    where.add_argument("--token-file", metavar="FILE", help="only who sends Authorization: Bearer with its content")
    where.add_argument("--tls-cert", metavar="FILE", help="certificate chain in PEM, for https")
    where.add_argument("--tls-key", metavar="FILE", help="its key")
    load = parser.add_argument_group("under load")
    load.add_argument("--replicas", type=whole("replicas", 1), metavar="N", help="processes with the model, default 1")
    load.add_argument(
        "--max-batch",
        type=whole("max-batch", 1),
        metavar="ROWS",
        help="of requests that wait, put together; default 32, and 1 for a cut model",
    )
    load.add_argument(
        "--deadline", default="1s", metavar="TIME", help="default 1s; or 200ms; a request may say its own"
    )
    load.add_argument(
        "--queue", type=whole("queue", 1), default=256, metavar="N", help="requests that wait, default 256"
    )
    load.add_argument("--max-body", default="64MB", metavar="SIZE", help="of a request, default 64MB")
    add_cut_arguments(parser)
    parser.add_argument("--access-log", metavar="FILE", help="a line of JSON a request; - is stderr")
    parser.add_argument("--json", action="store_true", help="when it answers, tell where as a line of JSON")


def execute(options: argparse.Namespace) -> int:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(f"serving needs {missing[0]}: pip install 'paceline[serve]'")
    check_script(options.script)
    _check_checkpoint(options.checkpoint)
    given = {flag: getattr(options, flag) for flag in CUT_FLAGS if getattr(options, flag) is not None}
    split = read_split(given)
    if split is not None:
        _check_split(split, options.replicas)
    tls = _tls(options.tls_cert, options.tls_key)
    token = read_token(_existing("token-file", options.token_file)) if options.token_file is not None else None
    from paceline.serve.served_tensor import read_input
    from paceline.serve.server import ServeSettings, run

    settings = ServeSettings(
        checkpoint=options.checkpoint,
        script=options.script,
        arguments=options.arguments or [],
        name=_name(options.name, options.checkpoint),
        host=options.host,
        port=_port(options.port),
        replicas=options.replicas or 1,
        split=split,
        inputs=[read_input(text) for text in options.input],
        most_rows=options.max_batch or (32 if split is None else 1),
        deadline_s=_time("deadline", options.deadline),
        most_waiting=options.queue,
        most_body=_size("max-body", options.max_body),
        token=token,
        tls=tls,
        access_log=options.access_log,
        json=options.json,
    )
    if token is None and not is_loopback(options.host):
        from paceline.cli import complain

        complain(f"whoever reaches {options.host} may ask, load and unload: --token-file lets only some")
    return run(settings)


def _check_checkpoint(path: str) -> None:
    if not os.path.isfile(path):
        what = "this is a folder" if os.path.isdir(path) else "there is no such file"
        raise InvalidInput("model", path[:200], f"{what}, give a .safetensors file as trainer.save writes it")
    if path.endswith(".py"):
        raise InvalidInput("model", path[:200], "give the .safetensors file first, and the script with --script")


def _check_split(split: Any, replicas: int | None) -> None:
    if replicas is not None:
        raise StrategyError("replicas", replicas, "a cut model has all cores already, leave --replicas out")
    if (split.parts_of_batch or 1) > 1:
        raise StrategyError("layout", split.words, "requests come one by one, so give no axis to the batch")
    cores = len(allowed_cores())
    if split.devices > MOST_DEVICES_A_CORE * cores:
        raise StrategyError("split", split.words, f"that needs {split.devices} devices and there are {cores} cores")


def _name(given: str | None, checkpoint: str) -> str:
    name = Path(checkpoint).stem if given is None else given
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise InvalidInput(
            "name", name[:100], "it is part of addresses: give --name with letters, digits, dots, - and _"
        )
    return name


def _port(text: str) -> int:
    if not (is_count(text) and int(text) < 65536):
        raise InvalidInput("port", text[:20], "give a number from 0 to 65535")
    return int(text)


def _tls(certificate: str | None, key: str | None) -> tuple[str, str] | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        there, missing = ("tls-cert", "--tls-key") if key is None else ("tls-key", "--tls-cert")
        raise InvalidInput(there, certificate or key, f"it needs {missing} too")
    return str(_existing("tls-cert", certificate)), str(_existing("tls-key", key))


def _existing(field: str, path: str) -> Path:
    if not os.path.isfile(path):
        raise InvalidInput(field, path[:200], "there is no such file")
    return Path(path)


def _time(field: str, text: str) -> float:
    """
    >>> _time("deadline", "200ms"), _time("deadline", "2")
    (0.2, 2.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s)?", text)
    seconds = float(found[1]) * (0.001 if found[2] == "ms" else 1.0) if found else 0.0
    if not 0 < seconds <= MOST_DEADLINE_S:
        raise InvalidInput(field, text[:20], f"give a time such as 1s or 200ms, up to {MOST_DEADLINE_S:g}s")
    return seconds


def _size(field: str, text: str) -> int:
    """
    >>> _size("max-body", "64MB"), _size("max-body", "1000")
    (64000000, 1000)
    """
    found = re.fullmatch(r"(\d{1,15})\s*([KMG]?B)?", text.upper())
    size = int(found[1]) * _UNITS[found[2] or "B"] if found else 0
    if size < 1:
        raise InvalidInput(field, text[:20], "give a size such as 64MB")
    return size
