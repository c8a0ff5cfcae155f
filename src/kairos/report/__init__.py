"""Table, figures and report of an experiment, from the files that the other stages wrote.

Only the figure of conditional samples imports torch.
"""
