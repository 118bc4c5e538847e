"""A home on its event loop: the domain, those who wait for it, and what is streamed to them."""
