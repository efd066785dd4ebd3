"""A script for `paceline tune` that tells its metric by the pipe of findings, as a trainer does, and imports no torch:
dozens of trials in the time of one. What it counts it saves into its folder and goes on from.

score = -(x - 3)^2 + wide / 10, told after each of its steps a bit nearer to that.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import paceline as pl
from paceline.exchange.board import Board
from paceline.exchange.words import HostWord
from paceline.findings import Finding, MessageWriter
from paceline.run_place import find_place

LONGEST_HOLD_S = 300.0  # if nobody kills it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--x", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--wait-for-stop", type=float, default=0.0, help="seconds, after the first step, unless x is 3")
    parser.add_argument("--holds", type=int, default=-1, help="the trial that waits after its first step to be killed")
    parser.add_argument("--fails-above", type=float, default=1e9)
    parser.add_argument("--crashes-at", type=float, default=1e9)
    options = parser.parse_args()

    trial = pl.trial(wide=0)
    place = find_place()
    writer, board = MessageWriter(place.findings), Board(place.board)
    state = trial.folder / "state.txt"
    done = int(state.read_text()) if state.exists() else 0
    with (trial.folder / "starts.txt").open("a") as file:
        file.write(f"{done}\n")
    # What was told last may have been lost with its supervisor: it is told again, as by an evaluation after a resume.
    for step in range(max(done, 1), options.steps + 1):
        time.sleep(options.pause)
        if options.x > options.fails_above:
            raise RuntimeError("x is too large")
        if options.x == options.crashes_at:
            os.kill(os.getpid(), signal.SIGSEGV)
        score = (-((options.x - 3) ** 2) + trial.wide / 10) * options.steps / step
        finding = Finding(
            f"log/{step}", "any", time.time(), time.monotonic(), step, step, {"score": score, "step": step}
        )
        writer.write(finding)
        unfinished = Path(f"{state}.unfinished")
        unfinished.write_text(str(step))
        os.replace(unfinished, state)
        (trial.folder / "model.safetensors").write_text(f"{score}")
        end = time.monotonic() + options.wait_for_stop * (step == 1 and options.x != 3)
        while time.monotonic() < end and not board.host_get(HostWord.STOP_REQUESTED):
            time.sleep(0.01)
        end = time.monotonic() + LONGEST_HOLD_S * (trial.number == options.holds and (done, step) == (0, 1))
        while time.monotonic() < end:
            time.sleep(0.02)
        if board.host_get(HostWord.STOP_REQUESTED) and step < options.steps:
            sys.exit(130)


if __name__ == "__main__":
    main()
