"""The page at `/`, used in a real browser as a person would: numbers, images, who answered and who was late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, is_installed
from serving import Served, save_weight

pytestmark = pytest.mark.skipif(not is_installed(), reason="there is no chromium with chromedriver here")
SCRIPT = Path(__file__).parent / "member_script.py"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("page")
    members = [folder / f"{name}.safetensors" for name in ("north", "south", "west")]
    for number, path in enumerate(members, 1):
        save_weight(path, float(number))
    with Served(folder, "--ensemble", "mean", "--deadline", "20s", script=SCRIPT, models=members) as served:
        yield served


@pytest.fixture(scope="module")
def page(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        browser.open(served.told["address"])
        yield browser


def test_numbers_are_typed_and_probabilities_seen(page: Browser) -> None:
    page.wait_for("Member; takes x FP32 [-1, 4]")
    page.type("#text", "0, 1, 0, 3")
    page.click("#send")
    page.wait_for("3 of 3 members, version 1", "#facts")
    assert page.text(".bar.best").startswith("3")
    shares = page.run("return [...document.querySelectorAll('.bar span:last-child')].map(n => parseFloat(n.innerText))")
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert page.text("#members").splitlines()[0].startswith("north version 1, process 1.")
    page.type("#text", "[[1, 2, 3]", instead=True)
    page.click("#send")
    page.wait_for("400: the body is not what it should be", "#bars .bad")


def test_an_image_is_chosen_and_one_is_dropped(page: Browser, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("L", (20, 20), 255).save(tmp_path / "white.png")
    page.choose("#file", tmp_path / "white.png")
    page.wait_for("25.0 %", "#bars")  # four white pixels are alike
    assert page.run("return !document.getElementById('preview').hidden")
    page.run(
        """const moved = new DataTransfer();
        const numbers = new Uint8Array(arguments[0]);
        moved.items.add(new File([numbers], "row.npy"));
        const drop = new DragEvent("drop", { dataTransfer: moved, bubbles: true });
        document.getElementById("drop").dispatchEvent(drop);""",
        list(_npy([9.0, 0.0, 0.0, 0.0])),
    )
    page.wait_for("100.0 %", "#bars")


def test_a_late_member_is_shown_and_so_is_what_the_server_does(page: Browser, served: Served, tmp_path: Path) -> None:
    hold = Path(f"{served.hold_file}-2")
    hold.touch()
    try:
        page.run(
            "window.fetchBefore = window.fetch; const f = window.fetch; window.fetch = (url, more) => f(url,"
            "{...more, headers: {...more.headers, 'Paceline-Deadline': '1'}});"
        )
        page.type("#text", "1 2 3 4")
        page.click("#send")
        page.wait_for("2 of 3 members", "#facts")
        page.wait_for("south not in the answer: ", "#members li.missing")
        page.picture(tmp_path / "late.png")
        assert (tmp_path / "late.png").stat().st_size > 10_000
    finally:
        hold.unlink()
        page.run("window.fetch = window.fetchBefore")
    page.click("#many")
    page.wait_for("answers a second", "#throughput-now")
    page.wait_for(" ms", "#latency-now")


def _npy(row: list[float]) -> bytes:
    import io

    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, np.array(row, np.float32))
    return buffer.getvalue()
