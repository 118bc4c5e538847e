"""kvferryd as a process: settings, addresses, TLS, strangers, and its end."""
