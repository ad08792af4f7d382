"""`trainctl watch`: the page of runs while they train, from their files alone."""
