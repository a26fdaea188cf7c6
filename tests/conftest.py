"""Settings that every test shares: the hypothesis profiles and torch's thread count."""

import os

import torch
from hypothesis import HealthCheck, settings

# No deadlines: they would time a shared machine, not the code.  The CI profile is derandomised so that a red
# build is a change in the code; the default one looks somewhere new on every run.
_SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile(
    "default", max_examples=50, derandomize=False, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile(
    "ci",
    max_examples=300,
    derandomize=True,
    deadline=None,
    suppress_health_check=_SLOW_IS_FINE,
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
