"""Visual reports: charts of plans, and a page of runs."""
