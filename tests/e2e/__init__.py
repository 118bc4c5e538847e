"""The whole of kvferry: real node servers, ranks in processes of their own, real NIXL between them."""
