"""Tests of `kvferry.testing`."""
