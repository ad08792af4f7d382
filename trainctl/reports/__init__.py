"""What people look at rather than read: charts of plans and of records."""
