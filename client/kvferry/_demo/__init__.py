"""The demonstration behind `kvferry demo`: two engines, their ranks processes of their own, and every byte checked."""
