"""The words of a board: what each says, who writes it, and the values that have names.

One writer a word at a time. How they are read and waited for is `board`'s.
"""

from __future__ import annotations

import enum

ROW_WORDS = 64


class HostWord(enum.IntEnum):
    """Words that belong to the whole host."""

    REPLICAS = 0
    EPOCH = 1  # membership epoch; odd while the supervisor is changing the rows
    STOP_REQUESTED = 2  # supervisor: please end after the step in progress
    STOP_AFTER = 3  # first member: the op after which all stop (0: none)
    TOTAL_STEPS = 4  # for the progress display; 0 while unknown
    SUPERVISED = 5  # 1 if a supervisor declares deaths
    CLOSED = 6  # the last step that is complete: all shards updated
    FIRST_REPLICA = 7  # number of this host's replica 0 among all hosts'
    BUFFERS_OF = 8  # first member: the op in which all take over its buffers
    CORES = 9  # of the host, for its replicas; 0: unknown
    DEVICES = 10  # that one replica is cut over; 0, 1: it is not
    RESUMED_AT = 11  # steps that an earlier run had made when this one made its first
    VIEW = 12  # supervisor: the newest view of the hosts; below 0 while it is written; 0: there are no other hosts
    OPENED = 13  # supervisor: the last view that all have entered
    DECIDED = 14  # first member: the last op that all hosts have completed; supervisor: the same before a view opens
    HOSTS_READY = 15  # supervisor: the view whose members may let in hosts that are ready
    STORE = 16  # a text of up to 32 words: address and port of the store through which processes of several hosts meet
    LET_IN_AFTER = 48  # first member: the step after which they are let in
    JOIN_AT = 49  # supervisor of a host that joins: the op in which it gets the run's state
    CALLED = 50  # replicas: 1 if the script has called pl.barrier, pl.mean …
    MODEL = 51  # replicas: a fingerprint of the newest trainer's model and optimizer


OVER_SAMPLES = -1.0  # in the place of a count: the loss is a mean over samples
NO_LOSS = -2.0  # the same: there is none yet, or another device speaks for this one


class Word(enum.IntEnum):
    """Words of one replica's row."""

    INCARNATION = 0  # supervisor: odd while a process runs in this row, one more when it ends or starts again
    ADMITTED = 1  # first member: the incarnation that takes part
    WORKING = 2  # tag of the op it is trying
    ARRIVED = 3  # tag of the last op whose part it has finished
    POSTED = 4  # tag and number of its last contribution to a collective
    READ = 27  # its last contribution to a collective that it has finished adding up
    NORMED = 5  # last op for which its owner's share of the gradient norm is known
    DONE = 6  # last op for which its owner's updates are complete
    UNDO = 7  # 1 + chunk it is updating at this moment; 0: none
    ADMIT_AT = 8  # first member: first op in which that incarnation takes part
    JOINING = 9  # the incarnation that was started again and is ready to take part
    PHASE = 10
    SINCE_NS = 11  # monotonic time at which the phase began
    STEP = 12
    SAMPLES = 13  # samples in its part of the step
    COMPUTE_NS = 14
    WAIT_NS = 15
    UPDATE_NS = 16
    OPTIONS = 17  # fingerprint of its optimizer's options
    LOSS = 18  # float: its share of the step's loss
    MEAN_LOSS = 26  # float: the mean loss over the whole batch of the last closed step
    SAMPLES_SEEN = 19  # samples of the whole batch, summed over the run
    PID = 20
    KIND = 21  # what kind of op it works on: all must do the same
    OP = 22  # the last op it has begun
    ARENAS = 23  # how many arenas it has had
    LANDED = 25  # the op, and how many buckets of its gradients are complete in this replica's buffer
    RETRIES = 24  # tries that had to be repeated because a member was lost
    GIVES = 28  # bytes of what it gives to a call of its script
    SEGMENT = 29  # descriptor of the memory it has made for such a call
    PARAMETERS = 30  # float: what a sample of its parameters comes to, where they are its own
    COUNT = 31  # float: what its share of the loss is a sum over; below 0: see `OVER_SAMPLES`, `NO_LOSS`
    UNIT = 32  # float: by what that sum was divided before backward
    LOGGED = 33  # bytes of what its loss logs beside itself, in the arena
    ASKED = 34  # how often it has asked a predictor, which all devices of its replica do together
    IN_VIEW = 35  # supervisor: the last view that this row is in
    ENTERED = 36  # the last view it has entered: it does nothing any more in those before
    COMPLETED = 37  # tag of the last op of which it has all that comes from other hosts
    VIEW_FAILED = 38  # the last view that it could not go on in
    GAVE_UP = 39  # the last op that it has given up, because it was late: it will never arrive there
    LIMIT = 40  # float: seconds that it was allowed for that
    LATE = 41  # float: seconds by which it was late
    LETS_IN = 42  # tag of the last step after which it has left its view to let hosts in
    DESCRIPTOR = 43  # the arenas it holds open: arena number and file descriptor, a word each, taking turns


class Kind(enum.IntEnum):
    """Kinds of ops, as a sentence names them."""

    BUILD = 0
    STEP = 1
    EVALUATE = 2
    SAVE = 3
    UPDATE = 4
    BATCHES = 5
    BARRIER = 6
    MEAN = 7
    GATHER = 8
    BROADCAST = 9
    LET_IN = 10
    SETTLE = 11

    @property
    def words(self) -> str:
        if self is Kind.LET_IN:
            return "lets in a host"
        if self is Kind.SETTLE:
            return "evaluates, saves or ends its batches"
        if self >= Kind.BARRIER:
            return f"calls pl.{self.name.lower()}"
        calls = "builds a trainer", "takes a step", "evaluates", "saves or resumes", "updates", "calls trainer.batches"
        return calls[self]


class Phase(enum.IntEnum):
    """What a replica is doing, for the display and for the sentence that explains a hang."""

    STARTING = 0
    LOADING = 1
    COMPUTING = 2
    AWAITING_GRADIENTS = 3
    UPDATING = 4
    AWAITING_UPDATES = 5
    AWAITING_STATISTICS = 6
    AWAITING_ARENA = 7
    EVALUATING = 8
    SAVING = 9
    AWAITING_SAVE = 10
    BETWEEN = 11  # in the user's own code between two ops
    AWAITING_ADMISSION = 12
    AWAITING_HOSTS = 13
    AWAITING_EVALUATION = 14
    AWAITING_WORK = 15  # from the chief of a centralized run
    AWAITING_SERVERS = 16
    AWAITING_DEVICES = 17  # of the same replica, whose model is cut
    AWAITING_OTHERS = 18  # in a call of the script's: pl.barrier, pl.mean …

    @property
    def words(self) -> str:
        """How a sentence names it: "waits for updates"."""
        name = self.name.lower().replace("_", " ")
        return name.replace("awaiting", "waits for") if self.is_wait else f"is {name}"

    @property
    def is_wait(self) -> bool:
        return self.name.startswith("AWAITING")


MOST_ARENAS = ROW_WORDS - Word.DESCRIPTOR  # that may be open at once
