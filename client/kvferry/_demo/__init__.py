"""The demonstration behind `kvferry demo`: two engines whose ranks are processes, on kvferry's public modules only.
Every byte is checked.

`run` plays the engines' schedulers and workers, and `pattern` stands for the KV cache that a model computes.
"""
