"""Processes that can be stopped and killed, scenarios of what happens to them, and who plays and judges those."""
