"""A machine that qemu emulates, with Debian's kernel, its soft-RoCE cards and this host's files."""
