"""What a run reports: metric names, JSON lines, wandb, console, summary, the run directory."""
