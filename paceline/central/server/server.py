"""A server: a process that only owns. Holds its share of any number of containers, and answers requests.

One thread a connection; each reads a request, does it, and replies. A request that is wrong is answered with a
sentence; bytes that are not a request end their connection, and nothing else. Server 0 of a container is its chief.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from paceline.central.container.bounds import check_open
from paceline.central.container.container import Container
from paceline.central.container.runs import ContainerRuns, Share
from paceline.central.container.training import ContainerTraining
from paceline.central.durability.backup import Backup
from paceline.central.durability.peer_journal import Link
from paceline.central.durability.recovery import keep, recover
from paceline.central.durability.snapshot import save
from paceline.central.messages import replies, requests
from paceline.central.messages.connection import Connection
from paceline.central.messages.tensor_bytes import entries_of
from paceline.central.server import welcome as welcoming
from paceline.central.server.session import Session
from paceline.central.server.welcome import welcome
from paceline.errors import PacelineError
from paceline.net.frames import Channel, ConnectionLost, FrameDamaged, tune
from paceline.net.secure import Keys, wrap_server
from paceline.net.strangers import Strangers, accept_all
from paceline.run_place import check_container

LOOK_EVERY_S = 0.25


class Server:
    """Answers on a listening socket until it is told to stop."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: str,
        keys: Keys | None = None,
        folder: Path | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._listener = listener
        self._token = token
        self._keys = keys
        self._folder = folder  # where logs of containers are kept
        self.say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._lock = threading.Lock()  # guards all below
        self._shares: dict[str, Share] = {}  # by container
        self._making = threading.Lock()  # held while a container is made, which may take a while
        self.backup = Backup()  # copies of other servers' shares
        self.recovered = threading.Event()  # until then nobody is answered but other servers about copies
        self.recovered.set()
        self._failure: BaseException | None = None  # what has ended it
        self._strangers = Strangers()
        self._not_expected: dict[int, int | None] = {}  # replicas, and which incarnations of them at most; None: all
        self._ended = threading.Event()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def run(self, *, recover: bool = False) -> None:
        """Serve until `stop`. `recover`: have again what a process before this one had, before anybody is answered."""
        if recover:
            self.recovered.clear()
            threading.Thread(target=self._recover, name="paceline-recover", daemon=True).start()
        threading.Thread(target=self._look, name="paceline-look", daemon=True).start()
        accept_all(self._listener, self._strangers, self._serve, self._ended, self.say)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the containers, after the end."""
        with self._lock:
            shares, self._shares = self._shares, {}
        for share in shares.values():
            share.close()

    def _look(self) -> None:
        with self._or_end():
            while not self._ended.wait(LOOK_EVERY_S):
                self._look_once()

    @contextlib.contextmanager
    def _or_end(self) -> Iterator[None]:
        """Have an error in here, which nobody waits for, end this server: it must not be taken for one that works."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self.stop()

    def _look_once(self) -> None:
        """Look by itself, so that between two looks nothing holds on to a container that was dropped."""
        with self._lock:
            shares = list(self._shares.values())
        for share in shares:
            if share.runs is not None:
                self._look_for_missing(share.runs)
            share.container.journal.look()

    def expect_no_more(self, replica: int, incarnation: int | None) -> None:
        """The process of that replica has ended, perhaps before it has come here; None: and no other will come."""
        with self._lock:
            self._not_expected[replica] = incarnation

    def expect_again(self, replica: int) -> None:
        """Another process of that replica is on its way."""
        with self._lock:
            self._not_expected.pop(replica, None)

    def _look_for_missing(self, runs: ContainerRuns) -> None:
        """What goes wrong in one container is said to those who train it, and ends nothing else."""
        with self._lock:
            not_expected = list(self._not_expected.items())
        try:
            for replica, incarnation in not_expected:
                runs.expect_no_more(replica, incarnation)
            runs.look_for_missing()
        except Exception as error:
            self.say(f"container {runs.container.name!r} failed:\n{traceback.format_exc()}")
            runs.closer.fail(error)

    # ── one connection ───────────────────────────────────────────────────────────────────────────────────

    def _serve(self, connection: socket.socket, address: str) -> None:
        session: Session | None = None
        known = False
        try:
            tune(connection)
            connection.settimeout(welcoming.HELLO_WITHIN_S)
            secured = wrap_server(connection, self._keys) if self._keys is not None else connection
            secured.settimeout(None)
            channel: Channel[requests.Request] = Channel(secured, requests.REQUESTS)
            with contextlib.closing(channel):
                # With keys the certificates have told who it is.
                welcome(channel, secured, self._token if self._keys is None else None)
                self._strangers.remove(connection)
                known = True
                session = Session(self, channel)
                session.serve()
        except FrameDamaged as error:
            self.say(f"closed the connection from {address}: {error}")
        except ConnectionLost as error:
            if not known:
                self.say(f"a stranger at {address} has gone: {error}")
        except (PacelineError, OSError) as error:
            self.say(f"closed the connection from {address}: {error}")
        except Exception:
            self.say(f"closed the connection from {address}:\n{traceback.format_exc()}")
        finally:
            self._strangers.remove(connection)
            connection.close()
            if session is not None:
                session.gone()

    # ── containers ───────────────────────────────────────────────────────────────────────────────────────

    def share(self, name: str) -> Share:
        with self._lock:
            if name not in self._shares:
                there = ", ".join(sorted(self._shares)) or "none"
                raise PacelineError(f"container {name!r} does not exist on this server: there is {there}")
            return self._shares[name]

    def container(self, name: str) -> Container:
        return self.share(name).container

    def runs(self, name: str) -> ContainerRuns:
        """Return the runs that train a container whose chief this server is."""
        runs = self.share(name).runs
        if runs is None:
            raise PacelineError(f"this server is not the chief of container {name!r}: ask its server 0")
        return runs

    def refuse_circle(self, asked: ContainerTraining, request: requests.Ask) -> None:
        """Refuse to have a replica wait for work of one trainer of its script while others wait, in another trainer,
        for what it has drawn there: each does one thing after the other, so that they would wait for ever."""
        holders, name = asked.lacks_for(request.replica), asked.state.settings.run
        with self._lock:
            shares = list(self._shares.values()) if holders else []
        for share in shares:
            run = share.runs.find(name) if share.runs is not None else None
            if run is None or run is asked:
                continue
            if waiting := holders & run.held_up_by(request.replica):
                other = f"replica {min(waiting)}"
                raise PacelineError(
                    f"replica {request.replica} waits for work of one trainer, of which {other} has the last samples, "
                    f"and {other} waits for replica {request.replica}'s part of another: with several trainers on "
                    "servers give drop_last=True, or batch sizes that leave samples for every replica in each batch"
                )

    def open(self, request: requests.Open) -> Container:
        """Return the container that a replica wants to train; make it if it is not there."""
        check_open(request)
        with self._making:
            with self._lock:
                share = self._shares.get(request.container)
            if share is None:
                container = Container(request.container, request.spec, request.server, request.settings)
                self._add(container, request.addresses)
                return container
        container = share.container
        if request.spec.servers != container.spec.servers:
            raise PacelineError(
                f"container {request.container!r} is spread over {container.spec.servers} servers and not over "
                f"{request.spec.servers}: give {','.join(container.addresses)}, or another name"
            )
        if difference := request.spec.differs_from(container.spec):
            raise PacelineError(
                f"container {request.container!r} holds another model: {difference}; give another name, or the "
                "same model and optimizer"
            )
        if request.server != container.server:
            raise PacelineError(
                f"this is server {container.server} of container {request.container!r} and not {request.server}: give "
                "the addresses in the order in which the container was made"
            )
        if self._begin_run(share, request):
            container.addresses = request.addresses
            self._keep(share)
            self.save(request.container)
        return container

    def _begin_run(self, share: Share, request: requests.Open) -> bool:
        """Let a run come, unless it is there; return whether it was not."""
        if share.runs is None:
            return share.container.reopen(request.spec, request.settings)
        if share.runs.find(request.settings.run) is not None:
            return False
        if request.first is not None or share.runs.has_let_go(request.settings.run, request.incarnation):
            raise PacelineError(
                f"container {request.container!r} has let this run go: none of its replicas was there when another came"
            )
        others = self._others(request.addresses, request.settings.timeout_s)
        return share.runs.open(request.spec, request.settings, request.addresses, others)

    def _add(self, container: Container, addresses: list[str]) -> Share:
        container.addresses = addresses
        runs = None
        if container.server == 0:
            runs = ContainerRuns(container, self._others(addresses, container.settings.timeout_s))
        share = Share(container, runs)
        self._keep(share)
        with self._lock:
            self._shares[container.name] = share
        return share

    def _keep(self, share: Share) -> None:
        keep(share, self._folder, self._to_backup, self.say)

    def save(self, name: str) -> None:
        """Have what was given from outside in the container's journal, if it has one, before that is acknowledged."""
        share = self.share(name)
        save(share, wait=True)
        share.container.journal.flush()

    def _recover(self) -> None:
        with self._or_end():
            found = recover(self._folder, self._others, self._to_backup, self.say) if self._folder is not None else ()
            for share in found:
                self._keep(share)
                with self._lock:
                    self._shares[share.container.name] = share
            self.recovered.set()

    def _others(self, addresses: Sequence[str], timeout_s: float) -> list[Connection]:
        """Return connections to the other servers of a container whose chief this one is."""
        how = {"token": self._token, "keys": self._keys, "who": "the chief", "timeout_s": timeout_s}
        return [
            Connection(address, name=f"server {number}", **how)  # type: ignore[arg-type]
            for number, address in enumerate(addresses)
            if number
        ]

    def _to_backup(self, address: str, who: str, name: str, timeout_s: float) -> Link:
        return Link(address, token=self._token, keys=self._keys, who=who, name=name, timeout_s=timeout_s)

    def drop(self, name: str, *, force: bool) -> None:
        share = self.share(name)
        living = share.runs.living if share.runs is not None else []
        if living and not force:
            runs = "; ".join(f"replicas {', '.join(map(str, run.presence.members))}" for run in living)
            raise PacelineError(
                f"container {name!r} is being trained, {runs}: end {'that run' if len(living) == 1 else 'these runs'} "
                "first, or give --force"
            )
        with self._lock:
            self._shares.pop(name, None)
        share.close()
        share.container.journal.remove()

    def copy(self, request: requests.Copy) -> None:
        """Make another container out of one: all of it if this is the chief, else this server's share."""
        check_container(request.to)
        with self._lock:
            if request.to in self._shares:
                raise PacelineError(f"container {request.to!r} is there already: give another name, or drop it first")
        if request.number:
            self._take_over(request, request.number)
            return

        def drop() -> None:
            with contextlib.suppress(PacelineError):
                self.drop(request.to, force=True)

        runs = self.runs(request.container)
        runs.closer.copy(runs.latest.state, request.to, lambda number: self._take_over(request, number), drop)

    def _take_over(self, request: requests.Copy, number: int) -> None:
        origin = self.share(request.container)
        held, frozen = origin.container, origin.container.frozen(number)
        with self._making:
            settings = msgspec.structs.replace(held.settings, run=f"copy of {request.container}")
            container = Container(request.to, held.spec, held.server, settings)
            container.take_over(frozen)
            copy = self._add(container, held.addresses)
        if origin.runs is not None and copy.runs is not None and frozen.books is not None:
            count = len(origin.runs.extras.buffers.tensors)
            extras = [(name, tensor.clone()) for name, tensor in frozen.extras]
            copy.runs.extras.describe(extras[:count], extras[count:], origin.runs.extras.keys)
            copy.runs.latest.state.take_books(frozen.books)
            copy.runs.latest.abandon()
        self.save(request.to)

    def description(self, name: str) -> replies.Described:
        share = self.share(name)
        container, runs = share.container, share.runs
        described = replies.Described(
            spec=container.spec, server=container.server, step=container.step, addresses=container.addresses
        )
        if runs is None:
            return described
        latest, extras = runs.latest, runs.extras
        return msgspec.structs.replace(
            described,
            members=latest.presence.members,
            rule=latest.state.chief.rule,
            accepting=latest.state.chief.accepting,
            runs=[_run_listed(run) for run in runs.living or [latest]],
            keys=extras.keys,
            buffers=entries_of(extras.buffers.tensors),
            frozen=entries_of(extras.frozen),
        )

    def listing(self) -> list[replies.Listing]:
        with self._lock:
            shares = list(self._shares.values())
        return [_listed(share) for share in shares]


def _listed(share: Share) -> replies.Listing:
    container, runs = share.container, share.runs
    listing = replies.Listing(
        name=container.name,
        step=container.step,
        bytes=container.bytes + sum(table.weight.nbytes for table in container.tables),
        tensors=len(container.spec.tensors) + len(container.spec.tables),
        optimizer=container.spec.optimizer.name,
    )
    if runs is None:
        return listing
    living, chief = runs.living, runs.latest.state.chief
    return msgspec.structs.replace(
        listing,
        replicas=sum(len(run.presence.members) for run in living),
        runs=len(living),
        rule=type(chief.rule).__name__.lower(),
        loss=chief.last.loss,
    )


def _run_listed(run: ContainerTraining) -> replies.RunListing:
    chief = run.state.chief
    return replies.RunListing(
        replicas=run.presence.members,
        rule=chief.rule.words,
        step=chief.step,
        seen=run.state.seen,
        loss=chief.last.loss,
    )
