"""The parts of report.html, and the charts and styles that all pages share."""
