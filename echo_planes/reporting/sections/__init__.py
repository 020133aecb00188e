"""Values that report.html shows, and charts that all pages share."""
