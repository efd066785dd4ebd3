"""Manifests for Kubernetes: a JobSet, or a TrainJob of Kubeflow's Trainer, with a pod a host.

Nothing runs here and nothing is reached: what is written is applied by whoever may. Each pod runs the `paceline run`
that somebody would type on that machine. Which host it is Kubernetes tells it in a variable, which it puts into
arguments that name it, $(SO): so no shell is needed in the image. Host 0 is found by its name.

A pod that fails ends all (backoffLimit 0): inside of its pod, a supervisor does what `--on-failure` says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from paceline.engines.setting import EngineSetting

PORT = 29500
HOST_VARIABLE = "PACELINE_HOST"
SECRETS = "/etc/paceline"  # where a pod has the run's token
MOST_NAME = 40  # letters: Kubernetes adds to it, and stops at 63
HOSTS = "hosts"  # what the one replicated job is called

Commands = Callable[[int, str], list[str]]  # arguments of `paceline` by host and rendezvous
Node = dict[str, Any]


def manifest_of(setting: EngineSetting, name: str, commands: Commands, token: str | None) -> str:
    """What `kubectl apply -f -` takes. `token`: a secret for the servers, if the user has given no file with one."""
    if setting.manifest == "trainjob":
        return as_yaml(_train_job(setting, label(name), commands))
    secret = _secret(label(name), token) if token is not None else None
    job_set = _job_set(setting, label(name), commands, secret)
    return "---\n".join(as_yaml(document) for document in (secret, job_set) if document is not None)


def how_to_apply(setting: EngineSetting, name: str) -> str:
    """What to type next."""
    kind = "jobset" if setting.manifest == "jobset" else "trainjob"
    logs = f"kubectl logs -f -l jobset.sigs.k8s.io/jobset-name={label(name)} --prefix"
    return f"apply it with kubectl apply -f -, look with {logs}, end it with kubectl delete {kind} {label(name)}"


def _job_set(setting: EngineSetting, name: str, commands: Commands, secret: Node | None) -> Node:
    rendezvous = f"{name}-{HOSTS}-0-0.{name}:{PORT}"
    arguments = commands(0, rendezvous)
    container: Node = {
        "name": "paceline",
        "image": setting.image,
        "command": ["paceline"],
        "resources": _resources(setting),
        "env": [
            {
                "name": HOST_VARIABLE,
                "valueFrom": {
                    "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
                },
            }
        ],
    }
    pod: Node = {"restartPolicy": "Never", "containers": [container]}
    if secret is not None:
        arguments = [arguments[0], "--token", f"{SECRETS}/token", *arguments[1:]]
        container["volumeMounts"] = [{"name": "secrets", "mountPath": SECRETS, "readOnly": True}]
        source = {"secretName": secret["metadata"]["name"], "defaultMode": 0o400}
        pod["volumes"] = [{"name": "secrets", "secret": source}]
    container["args"] = _told(arguments, {"--node-rank": HOST_VARIABLE})
    job = {
        "parallelism": setting.hosts,
        "completions": setting.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": HOSTS, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _train_job(setting: EngineSetting, name: str, commands: Commands) -> Node:
    """The runtime of torch tells a pod its place as torchrun is told, in variables that begin with PET_."""
    arguments = commands(0, f"host-0:{PORT}")
    if "--rdzv-endpoint" in arguments:  # it comes in two parts
        at = arguments.index("--rdzv-endpoint")
        arguments[at : at + 2] = ["--master-addr", "", "--master-port", ""]
    told = {
        "--nnodes": "PET_NNODES",
        "--node-rank": "PET_NODE_RANK",
        "--master-addr": "PET_MASTER_ADDR",
        "--master-port": "PET_MASTER_PORT",
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": setting.image,
                "command": ["paceline"],
                "args": _told(arguments, told),
                "numNodes": setting.hosts,
                "resourcesPerNode": _resources(setting),
            },
        },
    }


def _secret(name: str, token: str) -> Node:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-token"},
        "type": "Opaque",
        "stringData": {"token": token},
    }


def _resources(setting: EngineSetting) -> Node:
    wanted = {"cpu": str(setting.cores), **({"nvidia.com/gpu": str(setting.gpus)} if setting.gpus else {})}
    return {"requests": wanted, "limits": dict(wanted)}


def _told(arguments: Sequence[str], variables: dict[str, str]) -> list[str]:
    """Arguments in which the values of some of our own flags are what Kubernetes knows; all else stays as it is.

    >>> _told(["run", "--node-rank", "0", "train.py", "--", "--say", "$(DATE)"], {"--node-rank": "HOST"})
    ['run', '--node-rank', '$(HOST)', 'train.py', '--', '--say', '$$(DATE)']
    """
    told, own = [], True
    for before, word in zip(["", *arguments], arguments, strict=False):
        own = own and before != "--"
        told.append(f"$({variables[before]})" if own and before in variables else word.replace("$(", "$$("))
    return told


def label(name: str) -> str:
    """A name as Kubernetes takes it.

    >>> label("My_Train.py"), label("7")
    ('my-train', 'run-7')
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.lower().removesuffix(".py")).strip("-")
    return (words if words[:1].isalpha() else f"run-{words}")[:MOST_NAME].strip("-")


def as_yaml(node: Node) -> str:
    """A document of dicts, lists, texts and numbers as YAML, of which JSON's texts are part.

    >>> print(as_yaml({"kind": "A", "list": [{"a": 1, "b": ["x"]}, "it's: 2"], "none": []}), end="")
    kind: A
    list:
    - a: 1
      b:
      - x
    - "it's: 2"
    none: []
    """
    return "".join(f"{line}\n" for line in _lines(node))


def _lines(node: object) -> list[str]:
    if isinstance(node, dict) and node:
        return [line for key, value in node.items() for line in _entry(f"{_scalar(key)}:", value)]
    if isinstance(node, list) and node:
        lines = []
        for item in node:
            first, *rest = _lines(item)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        return lines
    return [_scalar(node)]


def _entry(key: str, value: object) -> list[str]:
    if isinstance(value, dict | list) and value:
        indent = "  " if isinstance(value, dict) else ""
        return [key, *(f"{indent}{line}" for line in _lines(value))]
    return [f"{key} {_scalar(value)}"]


def _scalar(value: object) -> str:
    """Words that nobody can take for a number, a date or a yes stand as they are."""
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value)
    if plain and str(value).lower() not in ("true", "false", "yes", "no", "on", "off", "null", "y", "n"):
        return str(value)
    return json.dumps(value)
