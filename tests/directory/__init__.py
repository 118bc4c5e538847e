"""Directories: files, DNS and etcd, and what clients, node servers and the command line do with them."""
