"""Directories in files and etcd, and their use by clients, node servers and the command line."""
