"""What changes parameters: optimizers, schedules, gradient norms."""
