"""Directories of engines and their homes, in a file or etcd (docs/deployment.md). For discovery only: a read whose
reference carries an address does not wait for a directory, and nothing in a directory is secret or proves anything."""
