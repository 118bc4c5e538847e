"""A node server for people and monitoring systems, over HTTP: metrics, health, state and a page. Changes nothing."""
