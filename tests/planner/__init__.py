"""The planner: oracle, refusals, counts, and how it explains itself."""
