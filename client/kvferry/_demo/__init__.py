"""The demonstration behind `kvferry demo`: an example of two engines whose ranks are processes, over kvferry's public
modules only, in which every byte is checked.

`run` is what an engine's scheduler and its workers do, and `pattern` stands for the KV cache that a
model computes.
"""
