"""Common code of the Snakefile, DVC and the Makefile: an experiment's layout and both ledgers; imports no torch."""
