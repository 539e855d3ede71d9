"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# gRPC would start threads of its own in every child that a test forks. One such child was ended by SIGBUS
# before its exec.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Hypothesis must not judge how fast a machine is.

settings.register_profile(
    "fenka", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("fenka")
