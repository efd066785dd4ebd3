"""`paceline serve --follow`: versions straight from a training, while it goes on, and after it."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from servers_here import Running, running, write_token
from serving import Served

import paceline as pl
from paceline.run_place import PLACE_VARIABLE, Place, ServersPlace
from paceline.strategy import Centralized

SCRIPT = Path(__file__).parent / "member_script.py"


@contextlib.contextmanager
def training(servers: list[Running], folder: Path) -> Iterator[pl.Trainer]:
    """A replica in this process: the weight after step n is n + 1."""
    spec = importlib.util.spec_from_file_location("member_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    addresses = [server.address for server in servers]
    place = Place(
        row=0,
        rows=1,
        strategy=Centralized(servers=2),
        servers=ServersPlace(addresses=addresses, container="steady", token_folder=str(folder)),
    )
    model = script.Member()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLACE_VARIABLE, msgspec.json.encode(place).decode())
        patch.setenv("HOLD_FILE", str(folder / "hold"))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = lambda model, batch: -model.weight.sum() + 0 * model(batch).sum()  # noqa: E731
        with contextlib.closing(pl.Trainer(model, optimizer, loss)) as trainer:
            yield trainer


def test_versions_come_from_a_training_and_stay_when_its_servers_are_gone(tmp_path: Path) -> None:
    folder = write_token(tmp_path / "servers")
    with contextlib.ExitStack() as ending:
        with contextlib.ExitStack() as going:
            servers = [going.enter_context(running()) for _ in range(2)]
            trainer = going.enter_context(training(servers, folder))
            batches = iter(trainer.batches(torch.ones(8, 4), batch_size=4, epochs=1000))

            def train(steps: int) -> None:
                for _ in range(steps):
                    trainer.step(next(batches))

            train(3)
            flags = [
                "--follow",
                f"{servers[1].address}:steady",
                "--follow-token",
                str(folder),
                "--follow-every",
                "50ms",
            ]
            served = ending.enter_context(Served(tmp_path, *flags, script=SCRIPT, models=[]))
            assert served.told["name"] == "steady"
            seen: dict[int, tuple[int, float]] = {}

            def look() -> int:
                """Asks once: every answer of a version is of the same step, and the weight is that step's."""
                answer = served.ask([1.0, 1, 1, 1])
                assert answer.status_code == 200, answer.text
                told = answer.json()
                step, weight = told["parameters"]["step"], told["outputs"][0]["data"][0]
                assert weight == step + 1
                assert seen.setdefault(int(told["model_version"]), (step, weight)) == (step, weight)
                assert answer.headers["Paceline-Step"] == str(step)
                return int(step)

            assert look() == 3
            for count in (2, 5, 1):
                before = max(seen)
                train(count)
                served.wait_for(lambda before=before: look() > 0 and max(seen) > before)  # type: ignore[misc]
            served.wait_for(lambda: look() == 11)
            assert served.client.post("/v2/repository/models/steady/load").status_code == 200
            look()
        served.wait_for(lambda: served.metric("paceline_source_lost") == 1)
        assert look() == 11
        (listed,) = served.client.post("/v2/repository/index").json()
        assert listed["state"] == "READY"
        assert listed["reason"].startswith("container steady at ")
        failed = served.client.post("/v2/repository/models/steady/load")
        assert (failed.status_code, "all is as it was" in failed.json()["error"]) == (400, True)
        assert f"version {max(seen)} answers on" in served.said
    assert "Traceback" not in served.said
