"""What a person or a monitoring system sees of a node server, over HTTP: metrics, health, state and a page. Reads the
home and changes nothing."""
