"""Rule R9 by brute force: any bytes end in a status, or in that connection closed; the server goes on."""
