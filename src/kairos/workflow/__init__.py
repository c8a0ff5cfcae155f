"""What the Snakefile, DVC and the Makefile share: the layout of an experiment and both ledgers; no torch in here."""
