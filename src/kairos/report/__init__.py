"""Table, figures and report of an experiment, from the files that the other stages wrote; imports no torch."""
