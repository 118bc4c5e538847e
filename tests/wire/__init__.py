"""What goes over the wire: geometry, references, secrets and errors, there and back."""
