"""Profiles of Hypothesis: ``quick`` for ``make test`` and ``make test-rehearsal``, ``validate`` for ``make validate``.

``--hypothesis-profile`` chooses one. ``quick`` draws the same examples in every run. ``validate`` draws new ones, and
prints how to repeat a failure. Tests that draw without Hypothesis call ``draws``.
"""

from hypothesis import HealthCheck, settings

QUICK, VALIDATE = "quick", "validate"

settings.register_profile(
    QUICK, max_examples=50, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
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
    """Return whether this is ``make validate``, which runs every case."""
    return settings.get_current_profile_name() == VALIDATE


def draws(quick: int, validate: int) -> int:
    """Return the number of cases that a test draws in this run."""
    return validate if validating() else quick


def share_of_examples(divisor: int) -> settings:
    """Return settings with a fraction of the examples, for slow ones such as simulated steps."""
    return settings(max_examples=max(settings.default.max_examples // divisor, 1))
