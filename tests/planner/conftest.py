"""How much hypothesis draws: `KVFERRY_EXAMPLES=5000` for a long run. `KVFERRY_SHRINK=0`: no failure is made small."""

import os

from hypothesis import HealthCheck, Phase, settings

EXAMPLES = int(os.environ.get("KVFERRY_EXAMPLES", "250"))
PHASES = list(Phase) if os.environ.get("KVFERRY_SHRINK") != "0" else [Phase.explicit, Phase.generate]

settings.register_profile(
    "plan",
    max_examples=EXAMPLES,
    derandomize="KVFERRY_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    database=None,
    report_multiple_bugs=False,
    phases=PHASES,
)
