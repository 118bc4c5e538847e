"""Directories in files, DNS and etcd, and their use by clients, node servers and the command line."""
