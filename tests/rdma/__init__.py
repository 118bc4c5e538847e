"""kvferry over RDMA: real verbs, over a card of this host or in an emulated machine (docs/rdma.md)."""
