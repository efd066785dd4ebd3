"""Every defect that was mended has a test that fails if the mend is taken out again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mend import LIMIT_S, Mend, all_mends, failures_without, what_does_not_fit

MENDS = all_mends()


def test_every_mend_is_in_the_code_once_and_its_tests_exist() -> None:
    wrong = [f"{mend.wrong}: {why}" for mend in MENDS if (why := what_does_not_fit(mend)) is not None]
    assert not wrong, "\n".join(wrong)
    assert len({mend.wrong for mend in MENDS}) == len(MENDS)


@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.wrong)
def test_without_its_mend_a_defect_is_found(mend: Mend, tmp_path: Path) -> None:
    for test, said in failures_without(mend, tmp_path).items():
        assert said, f"{test} passes without the mend"
        assert any(re.search(mend.says, failure, re.DOTALL) for failure in said), "\n\n".join(said)
