"""Where weights live and when they move: one schedule, executed, simulated and checked. Plain Python."""
