"""`paceline serve`: a trained model behind a port."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import is_count, whole
from paceline.cli.checks import check_script
from paceline.cli.cut import CUT_FLAGS, add_cut_arguments, read_split
from paceline.cli.run_plan import addresses
from paceline.combining import HOWS, KINDS, Combination
from paceline.errors import InvalidInput, LaunchError, StrategyError
from paceline.launch.cores import allowed_cores
from paceline.net.secure import Keys, is_loopback, read_token
from paceline.run_place import check_container

if TYPE_CHECKING:
    from paceline.serve.followed_container import FollowRequest
    from paceline.serve.served_tensor import ServedTensor

MOST_DEVICES_A_CORE = 4
MOST_DEADLINE_S = 3600.0
_NEEDED = ("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}

EXAMPLES = """\
examples:
  paceline serve model.safetensors --script train.py
  paceline serve model.safetensors --script train.py --replicas 2 --max-batch 64 --deadline 200ms
  paceline serve top/*.safetensors --script train.py --ensemble mean --quorum 2 --deadline 300ms
  paceline serve --follow 127.0.0.1:7070:digits --follow-token servers/0 --script train.py
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
    parser.usage = "paceline serve [MODEL …] --script SCRIPT [options] [-- the script's own arguments]"
    parser.description = "Answer requests with a trained model, over HTTP (Open Inference Protocol v2, and JSON)."
    parser.epilog = EXAMPLES
    parser.add_argument(
        "checkpoints", nargs="*", metavar="MODEL", help="a .safetensors file, as trainer.save writes it"
    )
    parser.add_argument("--script", required=True, metavar="SCRIPT", help="the Python file that makes the model")
    parser.add_argument("--name", help="of the model in addresses, default the file's without its ending")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME:TYPE:SHAPE",
        help="what the model takes, such as x:FP32:-1,64; default what the script's first batch says",
    )
    several = parser.add_argument_group("several models that answer as one")
    several.add_argument("--ensemble", metavar="HOW", help=f"how their answers are combined: {', '.join(HOWS)}")
    several.add_argument(
        "--quorum", type=whole("quorum", 1), metavar="N", help="members that an answer needs, default more than half"
    )
    several.add_argument("--outputs", metavar="KIND", help=f"of the models: {', '.join(KINDS)}; default logits")
    several.add_argument("--class-dim", type=int, metavar="N", help="along which classes lie, default -1")
    several.add_argument("--weights", metavar="W,W,…", help="of weighted and stacked, a number a member")
    followed = parser.add_argument_group("a model while it is trained")
    followed.add_argument("--follow", metavar="SERVERS:CONTAINER", help="such as 127.0.0.1:7070:digits, for a MODEL")
    followed.add_argument("--follow-token", metavar="PATH", help="the servers' token: the file, or the folder it is in")
    followed.add_argument("--follow-keys", metavar="FOLDER", help="instead of a token, on other machines")
    followed.add_argument("--follow-every", metavar="TIME", help="a new version that often at most, default 2s")
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
        "--pad",
        action="store_true",
        help="put together requests of several sizes, with zeros behind the shorter, where --input has a -1 more",
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
    members = _members(options)
    follow = _follow(options)
    ensemble = _ensemble(options, len(members))
    given = {flag: getattr(options, flag) for flag in CUT_FLAGS if getattr(options, flag) is not None}
    split = read_split(given)
    if split is not None:
        _check_split(split, options.replicas)
        if ensemble is not None:
            raise StrategyError("ensemble", options.ensemble, "members have a process each, so leave the cut out")
    tls = _tls(options.tls_cert, options.tls_key)
    token = read_token(_existing("token-file", options.token_file)) if options.token_file is not None else None
    from paceline.serve.served_tensor import read_input
    from paceline.serve.server import ServedMember, ServeSettings, run

    inputs = [read_input(text) for text in options.input]
    most_rows = options.max_batch or (32 if split is None else 1)
    if options.pad:
        _check_pad(inputs, most_rows)
    settings = ServeSettings(
        members=[ServedMember(**member) for member in members],
        ensemble=ensemble,
        follow=follow,
        script=options.script,
        arguments=options.arguments or [],
        name=_name(options.name, _default_name(members, follow)),
        host=options.host,
        port=_port(options.port),
        replicas=options.replicas or 1,
        split=split,
        inputs=inputs,
        most_rows=most_rows,
        pad=options.pad,
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


def _members(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the checkpoints that are served, and what their models are made with."""
    paths = options.checkpoints
    if options.follow is not None:
        if paths:
            raise InvalidInput("model", paths[0][:200], "--follow takes it from a training, leave it out")
        return []
    if not paths:
        raise InvalidInput("model", "", "give a .safetensors file, or a training to --follow")
    if options.ensemble is None:
        if len(paths) > 1:
            raise InvalidInput(
                "model", " ".join(paths)[:200], "give one, or say how they answer as one: --ensemble mean"
            )
        _check_checkpoint(paths[0])
        return [{"name": Path(paths[0]).stem, "checkpoint": paths[0], "arguments": options.arguments or []}]
    from paceline.cli.ensemble import read_members

    for path in paths:
        _check_checkpoint(path)
    members, _ = read_members(paths, options.arguments)
    for member in members:
        if re.search(r"[,;\s]", member.name) or not member.name.isascii():
            raise InvalidInput("model", member.name[:200], "answers name it, so give files without blanks or commas")
    return [
        {"name": one.name, "checkpoint": one.path, "arguments": one.made.arguments, "trial": one.made.trial}
        for one in members
    ]


def _ensemble(options: argparse.Namespace, members: int) -> tuple[Combination, int] | None:
    """Returns how members' answers become one, and how many there must be."""
    more = {
        "quorum": options.quorum,
        "outputs": options.outputs,
        "class-dim": options.class_dim,
        "weights": options.weights,
    }
    if options.ensemble is None:
        for field, value in more.items():
            if value is not None:
                raise InvalidInput(field, value, "it is of several models, say how they answer as one: --ensemble mean")
        return None
    if options.follow is not None:
        raise InvalidInput("ensemble", options.ensemble, "a training that is followed is one model, leave it out")
    weights = None
    if options.weights is not None:
        try:
            weights = tuple(float(weight) for weight in options.weights.split(","))
        except ValueError:
            raise InvalidInput("weights", options.weights[:100], "give numbers with commas, such as 0.5,0.3") from None
    if options.ensemble in ("weighted", "stacked") and weights is None:
        raise InvalidInput(
            "ensemble",
            options.ensemble,
            f"it needs --weights, which paceline ensemble --combine {options.ensemble} finds",
        )
    if options.ensemble in ("mean", "majority") and weights is not None:
        raise InvalidInput("weights", options.weights, "they are of --ensemble weighted and stacked, leave them out")
    dim = -1 if options.class_dim is None else options.class_dim
    if dim == 0:
        raise InvalidInput("class-dim", dim, "that is the dim of rows, give another")
    if options.ensemble not in HOWS:
        raise InvalidInput("ensemble", options.ensemble, f"give one of {', '.join(HOWS)}")
    combination = Combination(options.ensemble, options.outputs or "logits", dim, weights)
    combination.check(members)
    return combination, combination.quorum(options.quorum, members)


def _follow(options: argparse.Namespace) -> tuple[FollowRequest, float] | None:
    """Returns the training that is followed, and the least seconds between two versions."""
    if options.follow is None:
        for field in ("follow_token", "follow_keys", "follow_every"):
            if (value := getattr(options, field)) is not None:
                raise InvalidInput(field.replace("_", "-"), value, "it is of a training that you --follow")
        return None
    servers, _, container = options.follow.rpartition(":")
    if not re.search(r":\d+$", servers):
        raise InvalidInput("follow", options.follow[:200], "give servers and a container, as in 127.0.0.1:7070:digits")
    check_container(container)
    at = addresses("follow", servers)
    if (options.follow_token is None) == (options.follow_keys is None):
        raise InvalidInput("follow", options.follow[:200], "say how to be let in: --follow-token or --follow-keys")
    for address in at:
        if options.follow_keys is None and not is_loopback(address.rpartition(":")[0]):
            raise InvalidInput("follow", address, "beyond this machine give --follow-keys, made by paceline keys make")
    token = read_token(Path(options.follow_token)) if options.follow_token is not None else ""
    if options.follow_keys is not None:
        Keys.load(Path(options.follow_keys))
    from paceline.serve.followed_container import FollowRequest

    request = FollowRequest(addresses=at, container=container, token=token, keys=options.follow_keys)
    return request, _time("follow-every", options.follow_every or "2s")


def _default_name(members: list[dict[str, Any]], follow: tuple[FollowRequest, float] | None) -> str:
    if follow is not None:
        return follow[0].container
    return str(members[0]["name"]) if len(members) == 1 else "ensemble"


def _check_pad(inputs: list[ServedTensor], most_rows: int) -> None:
    if not any(-1 in spec.shape[1:] for spec in inputs):
        told = ", ".join(f"{spec.name} {spec.shape}" for spec in inputs) or "no --input"
        raise InvalidInput("pad", told, "say which dims may be of any size, as in --input ids:INT64:-1,-1")
    if most_rows == 1:
        raise InvalidInput("pad", "with --max-batch 1", "nothing is put together then, leave one of them out")


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


def _name(given: str | None, default: str) -> str:
    name = default if given is None else given
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
