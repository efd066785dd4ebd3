"""Processes of tests that begin in milliseconds: forked from one that has torch, as the runs of `paceline tune` are.

Most of what a test costs is a Python that loads torch, so each worker does that once. `PACELINE_TESTS_COLD=1` has every
process be a new Python instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.launch.run_template import RunRequest, RunTemplate
from paceline.launch.starter import MIRRORED, ON_SERVERS, SERVER, TRAINER
from paceline.torch_private import EXPORTER

MAIN = "import sys; from paceline.cli import main; sys.exit(main())"
SCRIPT = "paceline.launch.script"
CUTS = frozenset(("--mesh", "--layout", "--stages", "--tiles", "--wavefront"))
READ_BY_PYTHON = ("PYTHON", "LC_", "LANG")  # variables of these names, when it begins


class WarmProcess(subprocess.Popen[str]):
    """A `Popen` whose process is forked from a template."""

    _template: RunTemplate

    def __init__(self, template: RunTemplate, request: RunRequest, stdin: int | None) -> None:
        self._template, self._request = template, request
        self._code: int | None = None
        super().__init__(
            [sys.executable], text=True, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, close_fds=True
        )

    def _execute_child(self, *arguments: Any) -> None:
        p2cread, _, _, c2pwrite, _, errwrite = arguments[10:16]
        self._run = self._template.fork(self._request, [0 if p2cread == -1 else p2cread, c2pwrite, errwrite])
        self._closed_child_pipe_fds = True
        for descriptor in (p2cread, c2pwrite, errwrite):
            if descriptor != -1:
                os.close(descriptor)
        self.pid = self._run.number
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._run.wait(0)
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        code = self._run.wait(0 if wait_flags else None)
        return (0, 0) if code is None else (self.pid, code << 8 if code >= 0 else -code)


class WarmProcesses:
    """The templates of one worker's processes: of those that have a cut model, and of others."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: that of most of them."""
        self._known = dict(environment)
        loads = [TRAINER, ON_SERVERS, SERVER, *MIRRORED, "quick_end"]
        self._whole = RunTemplate(loads, environment=self._known)
        self._cut = RunTemplate([*loads, EXPORTER], environment=self._known)

    def start(
        self, command: Sequence[str], folder: str, environment: Mapping[str, str], stdin: int | None
    ) -> WarmProcess | None:
        """Returns the process of a command, or None if it is to be a new Python."""
        front = list(command[:3])
        if front == [sys.executable, "-c", MAIN] and command[3] in ("run", "verify"):
            module = ""
        elif front == [sys.executable, "-m", SCRIPT]:
            module = SCRIPT
        else:
            return None
        if os.environ.get("PACELINE_TESTS_COLD") or _of_python(environment) != _of_python(self._known):
            return None
        changed = {**dict.fromkeys(self._known), **environment}
        request = RunRequest(arguments=list(command[3:]), environment=changed, cores=[], folder=folder, module=module)
        template = self._cut if not CUTS.isdisjoint(command) else self._whole
        return WarmProcess(template, request, stdin)

    def close(self) -> None:
        for template in (self._whole, self._cut):
            template.close()


def _of_python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_BY_PYTHON)}
