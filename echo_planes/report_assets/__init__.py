"""The parts report.html is made of: charts, sample rollouts, style."""
