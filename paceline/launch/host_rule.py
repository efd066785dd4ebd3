"""The one rule for a run on several hosts with servers of its own: who goes on when all of a host is gone.

Host 0 and hosts with servers have to stay, and whoever loses sight of host 0 ends.

    what happens on a host                             the others
    a replica is killed                                go on or start it again, as on one host
    its last replica has ended                         go on; its servers stay until all hosts have finished
    something fails for good, or a server is lost      end, and say why
    all of it is gone, and it had a server or is 0     end, and say so
    all of it is gone, and it had replicas alone       go on without them, unless on-failure is stop

So if the network falls into two parts, one of them goes on at most, and there is nothing to vote on.
"""

from __future__ import annotations

from paceline.launch.host_messages import HostLost
from paceline.launch.job import RunJob


def goes_on_without(job: RunJob, lost: HostLost) -> tuple[bool, str]:
    """Whether the run goes on when a host is gone, and the sentence that says so."""
    servers = [number for number, host in enumerate(job.server_hosts) if host == lost.host]
    if lost.host == job.place.host:
        return False, f"the other hosts go on without this one ({lost.why}); the run ends here"
    what = f"host {lost.host} is gone ({lost.why})"
    if lost.host and not servers and job.on_failure != "stop":
        return True, f"{what}; the replicas of the other hosts go on"
    if servers:
        plural = "s" if len(servers) > 1 else ""
        what += f", and server{plural} {', '.join(map(str, servers))} with it"
    return False, f"{what}; the run ends"


def replicas_of(job: RunJob, host: int) -> range:
    """The replicas that a host has."""
    rows = job.place.rows
    return range(host * rows, (host + 1) * rows)
