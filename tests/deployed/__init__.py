"""What an operator installs, installed: the image built and run, the unit started by systemd. `make test-deployed`."""
