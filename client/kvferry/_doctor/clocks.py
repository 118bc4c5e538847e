"""The clock by which leases are judged. Clocks of two hosts are never compared (PROTOCOL)."""

from __future__ import annotations

import time

from kvferry._doctor.finding import Finding, Kind, Level
from kvferry._doctor.host import Host

GOOD = Kind("clock-good", Level.OK)
SUSPENDED = Kind(
    "clock-suspended",
    Level.WARNING,
    "Leases ran on while the host stood still: reads that were under way then ended as EXPIRED, and node servers may "
    "have lost their engines.",
    "Nothing, if it was long ago. Restart a kvferryd whose virtual machine was paused for minutes; its engines "
    "register again by themselves. Do not suspend nodes that serve.",
)
SLOW_SOURCE = Kind(
    "clock-slow-source",
    Level.WARNING,
    "Each look at the clock is a call of the kernel to a slow device, and engines and node servers look often.",
    "Have the kernel use tsc or the hypervisor's clock: "
    "/sys/devices/system/clocksource/clocksource0/current_clocksource.",
)
NO_BOOTTIME = Kind(
    "clock-without-suspends",
    Level.WARNING,
    "This system has no CLOCK_BOOTTIME: the time of a suspended host is not counted, and leases may be judged "
    "too kindly.",
    "Run engines and node servers on Linux.",
)
KINDS = (GOOD, SUSPENDED, SLOW_SOURCE, NO_BOOTTIME)

SLOW = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")


def check(host: Host) -> list[Finding]:
    """Look at the clock's source, and at how long this host was suspended since its start."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return [NO_BOOTTIME.found("no CLOCK_BOOTTIME")]
    suspended = time.clock_gettime(clock) - time.clock_gettime(time.CLOCK_MONOTONIC)
    source = host.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    findings = []
    if suspended > 1.0:
        findings.append(SUSPENDED.found(f"since its start this host was suspended for {suspended:,.0f} s"))
    if source in SLOW:
        findings.append(SLOW_SOURCE.found(f"the kernel's clock source is {source}"))
    return findings or [GOOD.found(f"CLOCK_BOOTTIME, from {source or 'a source that is not told'}; never suspended")]
