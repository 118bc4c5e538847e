"""Tests of two hosts: two machines that are joined by cables."""
