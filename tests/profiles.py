"""How much the tests draw: ``quick`` in ``make test`` and ``make test-rehearsal``, ``validate`` in ``make validate``.

Both are profiles of Hypothesis (``--hypothesis-profile``); a test that draws without Hypothesis asks ``draws``. A quick
run draws the same examples every time. A validating one draws new ones, and prints what repeats a failure.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

QUICK, VALIDATE = "quick", "validate"

settings.register_profile(
    QUICK,
    max_examples=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    VALIDATE,
    max_examples=250,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def validating() -> bool:
    """Return whether every case runs, and not only those that stand for the others."""
    return settings.get_current_profile_name() == VALIDATE


def draws(quick: int, validate: int) -> int:
    """Return how many cases a test draws."""
    return validate if validating() else quick


def share_of_examples(divisor: int) -> settings:
    """Return settings for a property whose every example takes long, such as a simulated step."""
    return settings(max_examples=max(settings.default.max_examples // divisor, 1))
