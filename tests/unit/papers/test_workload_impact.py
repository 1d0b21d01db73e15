"""The impact of mixing requests, against values computed by hand from equations 1, 2 and 4."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import TRUE, profile_of

from rescheduler.papers.jain_router.environment import RouterConfig
from rescheduler.papers.jain_router.workload_impact import (
    ImpactRules,
    decode_impact,
    guidance,
    mixing,
    prompt_impact,
)
from rescheduler.step_time.profile import write_profile

V100 = ImpactRules(prompt_gradient=3.2e-4, decode_gradient=3.3e-5, balance=0.5, tolerance=2.0)


def test_a_prompt_costs_nothing_up_to_the_tolerance() -> None:
    # T = 3.2e-4 · (50² + 1000) = 1.12 s
    assert prompt_impact(V100, 1000.0, 50.0) == 1.0
    # T = 3.2e-4 · (50² + 10000) = 4 s, twice the tolerance
    assert prompt_impact(V100, 10_000.0, 50.0) == pytest.approx(-1.0)


def test_decodes_are_slowed_by_all_tokens_that_are_there_or_come() -> None:
    # −3.3e-5 · (10000 + 50 + 200)
    assert decode_impact(V100, 10_000.0, 50.0, 200.0) == pytest.approx(-0.33825)


def test_both_phases_are_balanced() -> None:
    assert mixing(V100, 10_000.0, 50.0, 200.0) == pytest.approx(0.5 * -1.0 + 0.5 * -0.33825)
    prompt_only = V100._replace(balance=1.0)
    assert mixing(prompt_only, 10_000.0, 50.0, 200.0) == pytest.approx(-1.0)


def test_guidance_is_how_much_worse_than_the_least_impact() -> None:
    load = np.array([10_000, 1000])
    # mixing is −0.669125 on the first, 0.5 · 1 − 0.5 · 3.3e-5 · 1250 = 0.479375 on the second
    assert guidance(V100, load, 50.0, 200.0, 0) == pytest.approx(-1.1485)
    assert guidance(V100, load, 50.0, 200.0, 1) == 0.0
    assert guidance(V100, load, 50.0, 200.0, -1) == pytest.approx(-1.1485), "waiting is the worst"


@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=8),
    st.integers(1, 1000),
    st.floats(1, 4000),
)
def test_guidance_is_zero_exactly_for_the_least_impact_and_never_above(
    load: list[int], prompt: int, output: float
) -> None:
    values = [guidance(V100, np.array(load), float(prompt), output, g) for g in range(len(load))]
    assert max(values) == 0.0
    assert values[int(np.argmin(load))] == 0.0


def test_gradients_come_from_a_profile(tmp_path: Path) -> None:
    profile = profile_of(TRUE)
    write_profile(profile, tmp_path / "profile.yaml")
    config = RouterConfig(profile=tmp_path / "profile.yaml", balance=0.25, tolerance_s=3.0)
    gradients = profile.gradients
    assert config.impact() == ImpactRules(gradients.prompt, gradients.decode, 0.25, 3.0)
    assert config.alone() == (gradients.prompt, profile.batch.seconds(1, 0))
    with pytest.raises(ValueError, match="no profile of an engine"):
        RouterConfig(profile=tmp_path / "missing.yaml").impact()
