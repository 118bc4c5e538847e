"""The demonstration behind `kvferry demo`: two engines whose ranks are processes; every byte is checked."""
