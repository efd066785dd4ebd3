"""What the machine has decides before anything is started."""

import pytest

from paceline.cli.checks import REPLICA_BYTES, check_memory
from paceline.errors import StrategyError
from paceline.machine import free_memory


def test_more_replicas_than_fit_into_memory_are_refused_before_they_bring_it_down() -> None:
    too_many = 2 * free_memory() // REPLICA_BYTES
    with pytest.raises(StrategyError, match=rf"replicas is {too_many}: torch alone takes \d+ GiB .* give at most \d+"):
        check_memory(too_many)
    check_memory(1)
