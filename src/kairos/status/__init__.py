"""What `kairos status` and `kairos doctor` look at: trainings, the queue, the machine. No torch here."""
