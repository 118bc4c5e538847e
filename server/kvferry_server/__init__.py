"""The node server of kvferry, run as kvferryd or embedded by kvferry.serve()."""
