"""Which setting has no effect in which plan, and why: one table, for the line that is printed and the run's config.

A setting that is accepted and ignored is the worst answer: whoever gave it believes in it.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.cli.run_plan import BETWEEN_HOSTS, RunPlan
from paceline.cli.run_rendezvous import by_collectives
from paceline.net.secure import is_loopback

Condition = Callable[[RunPlan], bool]


def unused(plan: RunPlan) -> dict[str, str]:
    """The flags that change nothing in this plan, whether given or not, and why."""
    return {flag: why for flag, has_no_effect, why in _TABLE if has_no_effect(plan)}


def _nothing_on_a_link(plan: RunPlan) -> bool:
    strategy = plan.strategy
    if strategy.on_servers:
        addresses = plan.join.split(",") if plan.join is not None else []
        return (
            strategy.exchange != "tcp"
            and not plan.meets
            and all(is_loopback(address.rpartition(":")[0]) for address in addresses)
        )
    return plan.hosts == 1 and not by_collectives(strategy)


def _no_local_steps(plan: RunPlan) -> bool:
    return not plan.strategy.on_servers and plan.strategy.every == 1


def _one_process(plan: RunPlan) -> bool:
    return plan.strategy.processes == 1 and plan.strategy.server_processes == 0


def _nobody_waits(plan: RunPlan) -> bool:
    """Also threads of one process wait for one another."""
    return _one_process(plan) and plan.strategy.replicas == 1


def _one_replica(plan: RunPlan) -> bool:
    """Also not one of several runs that train the same container."""
    return plan.strategy.replicas == 1 and plan.join is None


def _no_restart(plan: RunPlan) -> bool:
    starts_servers_again = plan.strategy.durable and plan.join is None
    return plan.on_failure != "restart" and not starts_servers_again


_TABLE: tuple[tuple[str, Condition, str], ...] = (
    ("wire", _nothing_on_a_link, "no gradient crosses a link"),
    *((flag, _nothing_on_a_link, "no gradient crosses a link") for flag in BETWEEN_HOSTS),
    ("outer_lr", _no_local_steps, "hosts make no steps by themselves"),
    ("batchnorm", lambda plan: plan.strategy.replicas == 1, "there is one replica"),
    ("batchnorm", lambda plan: plan.strategy.on_servers, "with servers each replica has its own statistics"),
    ("exchange", _nobody_waits, "there is one process"),
    ("timeout_s", _nobody_waits, "one process waits for nobody"),
    ("schedule", lambda plan: plan.strategy.devices == 1, "there is one stage"),
    ("time_block", lambda plan: plan.strategy.devices == 1, "there is one device"),
    ("accept", _one_replica, "there is one replica"),
    ("async", _one_replica, "there is one replica"),
    ("bounded", _one_replica, "there is one replica"),
    ("stale", _one_replica, "gradients of one replica are never stale"),
    ("warmup_steps", _one_replica, "one replica makes all steps"),
    ("warmup_epochs", _one_replica, "one replica makes all steps"),
    ("in_graph", lambda plan: plan.strategy.replicas == 1, "one replica is one process"),
    ("on_failure", lambda plan: _one_process(plan) and plan.on_failure != "restart", "nobody would go on"),
    ("max_restarts", _no_restart, "nothing is started again, --on-failure restart would"),
    ("host", lambda plan: plan.hosts == 1, "there is one host"),
    ("lost_after_s", lambda plan: not plan.meets, "supervisors of several hosts do not meet here"),
    ("plain", lambda plan: plan.quiet, "--quiet shows no progress"),
)
