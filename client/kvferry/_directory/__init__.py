"""Where engines have their homes: a file, DNS or etcd says it (docs/deployment.md). Discovery only: no read whose
reference carries an address waits for it, and nothing in a directory is secret or proves anything."""
