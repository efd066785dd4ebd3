"""What `paceline run --on kubernetes` writes fits the published schemas, and has every flag."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main

yaml = pytest.importorskip("yaml", reason="needs PyYAML (make engines)")
models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the published schemas (make engines)")

KINDS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def written(capfd: pytest.CaptureFixture[str], folder: Path, flags: str, *arguments: str) -> list[dict[str, Any]]:
    script = folder / "My_train.py"
    script.write_text("")
    line = ["run", str(script), "--on", "kubernetes", "--image", "registry/train:1", *flags.split(), "--", *arguments]
    assert main(line) == 0
    return list(yaml.safe_load_all(capfd.readouterr().out))


def fits(document: dict[str, Any]) -> None:
    """Nothing is missing, nothing has another type, and there is nothing that the schema does not have."""
    read = KINDS[document["kind"]].from_dict(document)
    assert read is not None
    assert read.to_dict() == document


@pytest.mark.parametrize("manifest", ["jobset", "trainjob"])
@pytest.mark.parametrize(
    "flags", ["--replicas 6", "--nproc-per-node 2 --wire bf16 --devices cuda:0,cuda:1", "--stages 2"]
)
def test_it_fits_the_published_schema(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, manifest: str, flags: str
) -> None:
    (document,) = written(capfd, tmp_path, f"--nnodes 3 --manifest {manifest} {flags}", "--lr", "$(LR): 'x'\n")
    fits(document)
    text = str(document)
    assert "registry/train:1" in text
    assert "$$(LR): 'x'" in yaml.safe_dump(document) or "$$(LR)" in text  # which is the script's own


def test_a_job_set_has_a_pod_a_host_that_is_told_its_number_and_where_host_0_is(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    secret, document = written(capfd, tmp_path, "--nnodes 3 --replicas 6 --servers 2 --async --gpus-per-node 2")
    fits(document)
    (hosts,) = document["spec"]["replicatedJobs"]
    job = hosts["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (3, 3, "Indexed")
    (container,) = job["template"]["spec"]["containers"]
    words = container["args"]
    told = dict(pairwise(words))
    assert told["--node-rank"] == "$(PACELINE_HOST)"
    assert told["--rdzv-endpoint"] == "my-train-hosts-0-0.my-train:29500"
    assert (told["--nnodes"], told["--replicas"], told["--servers"]) == ("3", "6", "2")
    assert "--async" in words
    assert container["resources"]["limits"] == {"cpu": "3", "nvidia.com/gpu": "2"}
    assert (secret["kind"], secret["metadata"]["name"]) == ("Secret", "my-train-token")
    (volume,) = job["template"]["spec"]["volumes"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert told["--token"] == f"{container['volumeMounts'][0]['mountPath']}/token"


def test_a_train_job_takes_its_place_from_what_the_runtime_of_torch_sets(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (document,) = written(capfd, tmp_path, "--nnodes 3 --replicas 6 --manifest trainjob")
    assert document["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = document["spec"]["trainer"]
    told = dict(pairwise(trainer["args"]))
    for flag, variable in (("--nnodes", "NNODES"), ("--node-rank", "NODE_RANK"), ("--master-addr", "MASTER_ADDR")):
        assert told[flag] == f"$(PET_{variable})"
    assert trainer["numNodes"] == 3


def test_a_train_job_with_servers_needs_a_secret_of_the_users(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("")
    line = f"run {tmp_path}/a.py --on kubernetes --image a:1 --nnodes 2 --replicas 2 --servers 1 --manifest trainjob"
    assert main(line.split()) == 2
    assert "manifest is 'trainjob': servers need a secret, give --token" in capfd.readouterr().err
