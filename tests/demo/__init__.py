"""The demo: two engines of one machine."""
