"""Rule R9 by brute force: whatever bytes come, they end in a status, or in that connection closed; the server goes on."""
