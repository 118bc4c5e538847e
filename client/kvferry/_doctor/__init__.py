"""Finds what will be slow or fail on this host: a table of checks (`catalogue`), each a function from the host to its
findings, whose texts are in `findings.md`. Tests give checks the files of other machines (`check.Host`)."""
