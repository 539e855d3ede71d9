"""For all tests: Hypothesis does not judge how fast a machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fenka", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("fenka")
