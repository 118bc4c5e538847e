"""The tests of kvferry."""
