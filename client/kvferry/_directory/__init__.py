"""Where engines have their homes: a file, DNS or etcd says it (docs/deployment.md). Discovery only: no read waits for a
directory whose reference carries an address, and nothing in a directory is secret or proves anything."""
