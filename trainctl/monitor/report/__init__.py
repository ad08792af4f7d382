"""What people look at rather than read: charts of plans, and a page of runs."""
