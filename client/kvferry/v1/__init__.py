"""The contract, generated from protos/kvferry/v1 by `make proto`."""
