"""What engines hand to the SDK: copied, checked, and refused while somebody else is using it."""
