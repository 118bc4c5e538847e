"""A node server for people and monitoring systems, over HTTP: metrics, health, state and a page. Reads the home and
changes nothing."""
