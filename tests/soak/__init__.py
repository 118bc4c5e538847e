"""Hours of random geometry, load and faults: `make soak`."""
