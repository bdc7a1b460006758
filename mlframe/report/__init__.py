"""`mlframe-report`: run folders in, results.csv, results.md, report.html and figures out. Imports no torch."""
