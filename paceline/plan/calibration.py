"""What this machine is good for, measured once by `paceline calibrate`: a small file that people can read, edit or
make up.

    ~/.cache/paceline/calibration.json     ($PACELINE_CACHE says where else)

An exchange's curve is what a step takes beyond computing: waiting for one another, sums, the update, whatever the
product does. It was measured on steps of a model of that many bytes, with SGD and momentum, so nothing in it is
assumed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import msgspec

from paceline.cache_folder import CACHE, cache_folder
from paceline.errors import InvalidInput
from paceline.machine import installed_version
from paceline.profile.values import Timing

FILE = "calibration.json"
BUSY = 0.2  # cores that others use: what is measured beside that is not to be trusted
HEADERS = 0.955  # of a link's rate is left for what is sent


class ExchangePoint(msgspec.Struct, frozen=True):
    """What an exchange takes for a model of so many bytes in so many tensors."""

    bytes: int
    seconds: float
    low: float
    high: float
    tensors: int = 8
    norms: int = 0  # BatchNorms, whose statistics are exchanged too
    computed_s: float = 0.0  # what computing took beside it

    @property
    def timing(self) -> Timing:
        return Timing(self.seconds, self.low, self.high)


class ExchangeCurve(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange by so many replicas, and servers if it has any."""

    exchange: str  # shared, cut, collective, servers, async, tcp, tls
    replicas: int
    servers: int = 0
    wire: str = "fp32"
    points: tuple[ExchangePoint, ...] = ()


class LearnedFactor(msgspec.Struct, frozen=True):
    """What runs have shown of one way of distributing: by what predictions have to be multiplied."""

    runs: int
    mean_log: float  # of measured over predicted
    spread_log: float  # root of the mean square around that


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a machine."""

    machine: str  # fingerprint; "made up" if nobody measured it
    made: str
    cores: int
    memory_bytes: int
    memory_bandwidth: float  # bytes a second that one core reads and writes
    memory_bandwidth_all: float  # all cores together
    neighbour_compute: float  # by what computing is slower beside busy cores
    neighbour_memory: float  # the same for moving memory
    mailbox_s: float  # until a device that waits goes on with what another has sent
    link_overhead: float = 0.5  # of the core's time for coding and sending, what is not hidden behind the link
    between_hosts_s: float = 0.002  # what a step takes between hosts, however small the model
    step_spread: float = 0.05  # of computing the same, from run to run
    curves: tuple[ExchangeCurve, ...] = ()
    learned: dict[str, LearnedFactor] = {}
    seconds: float = 0.0  # that calibrating took
    load: float = 0.0  # cores that other programs used meanwhile

    @property
    def made_up(self) -> bool:
        return self.machine == "made up"

    @property
    def disturbed(self) -> str | None:
        """Returns what has to be said of a calibration that was made beside other programs."""
        if self.load <= BUSY:
            return None
        used = f"other programs used {self.load:.1f} cores while this machine was calibrated"
        return f"{used}: do it again when it is quiet"


@cache
def fingerprint() -> str:
    """Names a machine by what makes its speed: processor, cores, memory, torch.

    >>> len(fingerprint().split(" · "))
    4
    """
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    try:
        torch = installed_version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch = "none"
    # All cores there are: a process on an emulated host may use some of them, and is on the same machine.
    return f"{model} · {os.cpu_count()} cores · {round(total_memory() / 2**30)} GiB · torch {torch}"


def total_memory() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_path() -> Path:
    """Returns the file of this user's machine; without a cache, one in the folder of this run."""
    folder = cache_folder()
    if folder is None and CACHE not in os.environ:
        raise InvalidInput(CACHE, "not set", "this user has no home to keep a calibration in, name a folder for it")
    return (folder if folder is not None else Path()) / FILE


def read(path: Path) -> Calibration:
    """Returns a calibration; a sentence if it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        expected = f"it cannot be read ({error.strerror}), make one with `paceline calibrate`"
        raise InvalidInput("calibration", str(path), expected) from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        expected = f"this is none ({error}), make one with `paceline calibrate`"
        raise InvalidInput("calibration", str(path), expected) from error


def write(calibration: Calibration, path: Path) -> None:
    """Writes a calibration so that people can read it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(text)
    os.replace(beside, path)


def made_up(cores: int, memory_bytes: int, like: Calibration | None) -> Calibration:
    """Returns a calibration of a machine that nobody measured: `like` another one, with so many cores."""
    if like is None:
        raise InvalidInput(
            "cores", cores, "costs of exchanges are taken from a measured machine, run `paceline calibrate`"
        )
    return msgspec.structs.replace(
        like, machine="made up", made=time.strftime("%Y-%m-%d"), cores=cores, memory_bytes=memory_bytes, learned={}
    )


def script_key(script: str, arguments: Sequence[str], *, module: bool = False) -> str:
    """Names a script's profile: by its text, what it is given, and the machine."""
    content = (_file_of(script) if module else Path(script)).read_bytes()
    told = "\0".join([os.path.abspath(script) if not module else script, *arguments, fingerprint()])
    return hashlib.blake2b(content + b"\0" + told.encode(), digest_size=12).hexdigest()


def _file_of(module: str) -> Path:
    """Returns the file that `python -m` would run, as far as it lies below this folder."""
    inner = Path(*module.split("."))
    return inner.with_suffix(".py") if inner.with_suffix(".py").exists() else inner / "__main__.py"
