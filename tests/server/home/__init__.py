"""The home: its timers and streams."""
