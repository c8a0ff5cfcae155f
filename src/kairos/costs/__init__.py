"""What an experiment will cost, said before anything of it runs."""
