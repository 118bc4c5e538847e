"""How much hypothesis draws of plans. `KVFERRY_SHRINK=0`: no failure is made small."""

import os

from hypothesis import HealthCheck, Phase, settings

from tests.support.examples import SAME, examples

PHASES = list(Phase) if os.environ.get("KVFERRY_SHRINK") != "0" else [Phase.explicit, Phase.generate]

settings.register_profile(
    "plan",
    max_examples=examples(250),
    derandomize=SAME,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    database=None,
    report_multiple_bugs=False,
    phases=PHASES,
)
