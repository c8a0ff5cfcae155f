"""Before an experiment runs: its estimated cost, checks of images, memory and time limits, and a first proposal."""
